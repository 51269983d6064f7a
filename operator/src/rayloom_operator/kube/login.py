"""Finds the API server and the operator's credentials, for kopf and for the operator's own client."""

from __future__ import annotations

import logging

import kopf

logger = logging.getLogger(__name__)


def login() -> kopf.ConnectionInfo:
    """Returns the API server's address and the credentials: of the pod's service account, or else of the kubeconfig.

    The package `kubernetes` is needed only for a kubeconfig that runs a program to get a token. Raises kopf.LoginError
    if there is neither a service account nor a kubeconfig.
    """
    settings = kopf.OperatorSettings()
    found = (
        kopf.login_with_service_account(settings=settings)
        or kopf.login_via_client(logger=logger, settings=settings)
        or kopf.login_with_kubeconfig(settings=settings)
    )
    if found is None:
        raise kopf.LoginError("no cluster: this is no pod, and KUBECONFIG and ~/.kube/config name none")
    return found
