"""The capability of access control."""

from martlet.contracts import UserChange


def test_a_change_does_not_show_its_secrets() -> None:
    change = UserChange(administrator=True, groups=("a",), password=b"letmein", secret=b"hush")
    assert repr(change) == "UserChange(administrator=True, disabled=None, groups=('a',))"
    assert str(change) == repr(change)
