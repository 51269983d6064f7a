"""The operator's key may be changed: engines that were created with the previous key are still polled and drained."""

import pytest

from rayloom_operator.cli.run import _previous_key
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.objects.companions import admin_token

OLD, NEW = b"0123456789abcdef", b"fedcba9876543210"
GROUP = ("team", "uid-1", "chat-00000000-0")


def test_there_are_two_tokens_while_there_are_two_keys():
    settings = Settings(engine_image="i", operator_key=NEW, previous_key=OLD)

    assert settings.admin_tokens(*GROUP) == (admin_token(NEW, *GROUP), admin_token(OLD, *GROUP))
    assert Settings(engine_image="i", operator_key=NEW).admin_tokens(*GROUP) == (admin_token(NEW, *GROUP), "")


def test_the_previous_key_need_not_be_there_and_is_none_when_it_is_too_short(tmp_path):
    assert _previous_key(None) == _previous_key(tmp_path / "previous") == b""
    (tmp_path / "previous").write_bytes(OLD + b"\n")
    assert _previous_key(tmp_path / "previous") == OLD
    (tmp_path / "previous").write_bytes(b"short")
    with pytest.raises(OperatorError, match="has 5 bytes"):
        _previous_key(tmp_path / "previous")
