"""Signature of a request to a reward function, for secrets that are shared and never sent.

    X-Rollart-Signature: t=1763524800,v1=<hex of HMAC-SHA256(secret, "1763524800." + body)>

The time makes an old request useless: a server refuses a signature that is more than `MAX_AGE_S` off its clock.
"""

import hashlib
import hmac
import re

HEADER = "X-Rollart-Signature"
MAX_AGE_S = 300.0
_FORM = re.compile(r"t=([0-9]{1,12}),v1=([0-9a-f]{64})")


def signature(secret: str, at: float, body: bytes) -> str:
    """Value of the header, for a request sent at `at` (Unix time).

    >>> signature("s", 1.5, b"{}")[:17]
    't=1,v1=b253639bcd'
    """
    stamp = str(int(at))
    return f"t={stamp},v1={_digest(secret, stamp, body)}"


def is_fresh(header: str, now: float) -> bool:
    """Whether the header has the form of a signature, made at about this time; no proof without the body.

    >>> header = signature("s", 1000.0, b"{}")
    >>> is_fresh(header, 1010.0), is_fresh(header, 2000.0), is_fresh("t=1000", 1010.0)
    (True, False, False)
    """
    return _parts(header, now) is not None


def is_signed(header: str, secret: str, now: float, body: bytes) -> bool:
    """Whether the header is a signature of this body that is not too old.

    >>> header = signature("s", 1000.0, b"{}")
    >>> is_signed(header, "s", 1010.0, b"{}"), is_signed(header, "s", 2000.0, b"{}"), is_signed(header, "x", 1e3, b"{}")
    (True, False, False)
    """
    parts = _parts(header, now)
    return parts is not None and hmac.compare_digest(parts[1], _digest(secret, parts[0], body))


def _parts(header: str, now: float) -> tuple[str, str] | None:
    """Time and digest of a header, if the time is about now."""
    found = _FORM.fullmatch(header)
    return (found[1], found[2]) if found is not None and abs(now - int(found[1])) <= MAX_AGE_S else None


def _digest(secret: str, stamp: str, body: bytes) -> str:
    return hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
