"""Only `parallel/` may import torch.distributed, so another transport would change only that folder.

No contract of import-linter can express this rule, because import-linter treats `torch` and its submodules as one
module.
"""

from __future__ import annotations

import ast
from pathlib import Path

import rayloom_engine

ROOT = Path(rayloom_engine.__file__).parent


def uses_distributed(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        if any(name.startswith("torch.distributed") for name in names):
            return True
    return False


def test_only_parallel_imports_torch_distributed() -> None:
    users = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py") if uses_distributed(path.read_text())}
    assert users == {"parallel"}


def test_every_form_of_the_import_is_found() -> None:
    forms = (
        "import torch.distributed as dist",
        "from torch.distributed import TCPStore",
        "from torch import distributed",
        "import torch\ntorch.distributed.barrier()",
    )
    assert all(uses_distributed(form) for form in forms)
    assert not uses_distributed("import torch\ntorch.arange(3)")
