"""The interval of status writes, measured by a clock that the tests control."""

from rayloom_operator.reconcile.write_pace import WritePace, without_words

KEY = ("team", "chat")


def status(state="Serving", message="well", nodes=("n1",), failure=None, **others):
    group = {"name": "g", "state": state, "nodes": list(nodes)} | ({"failure": failure} if failure else {})
    return {"conditions": [{"type": "Available", "status": "True", "message": message}], "groups": [group], **others}


def test_words_alone_are_written_every_5_seconds():
    pace = WritePace()

    assert pace.wait_s(KEY, status(message="a"), status(message="b"), 100.0) == 0
    assert pace.wait_s(KEY, status(message="b"), status(message="c"), 101.0) == 4.0
    assert pace.wait_s(KEY, status(message="b"), status(nodes=("n2",)), 104.5) == 0.5
    assert pace.wait_s(KEY, status(message="b"), status(message="d"), 105.0) == 0
    # Other services have a pace of their own.
    assert pace.wait_s(("team", "other"), status(message="a"), status(message="b"), 105.0) == 0


def test_fields_by_which_programs_decide_are_written_at_once():
    pace = WritePace()

    assert pace.wait_s(KEY, status(), status(message="b"), 100.0) == 0
    assert pace.wait_s(KEY, status(), status(state="Failed", message="c"), 100.1) == 0
    assert pace.wait_s(KEY, status(), status(ready="0/1"), 100.2) == 0
    assert pace.wait_s(KEY, status(), status(failure={"uid": "u", "message": "m"}), 100.3) == 0
    assert pace.wait_s(KEY, status(), status(message="d"), 100.5) == 4.5


def test_60_changes_may_come_at_once_and_two_a_second_after_that():
    pace = WritePace()

    def wait_s(number, now):
        return pace.wait_s(KEY, status(ready=str(number)), status(ready=str(number + 1)), now)

    assert [wait_s(number, 100.0) for number in range(60)] == [0.0] * 60
    assert wait_s(60, 100.0) == 0.5
    assert wait_s(60, 100.5) == 0.0
    assert wait_s(61, 100.5) == 0.5
    # After a minute without writes, 60 changes may come at once again.
    assert [wait_s(number, 160.0) for number in range(60)] == [0.0] * 60
    pace.forget(KEY)
    assert wait_s(0, 160.0) == 0.0


def test_a_status_without_its_words_has_all_else():
    failure = {"uid": "u", "message": "m"}

    assert without_words({}) == {"conditions": [], "groups": []}
    assert without_words(status(failure=failure, shape="TP1xPP1", loading="41 of 131 GB")) == {
        "conditions": [{"type": "Available", "status": "True"}],
        "groups": [{"name": "g", "state": "Serving", "failure": {"uid": "u"}}],
        "shape": "TP1xPP1",
    }
