"""Signature of a request to a reward function, for secrets that are shared and never sent.

    X-Rollart-Signature: t=1763524800,v1=<hex of HMAC-SHA256(secret, "1763524800." + body)>

The time makes an old request useless: a server refuses a signature that is more than `MAX_AGE_S` off its clock.
"""

import hashlib
import hmac

HEADER = "X-Rollart-Signature"
MAX_AGE_S = 300.0


def signature(secret: str, at: float, body: bytes) -> str:
    """Value of the header, for a request sent at `at` (Unix time).

    >>> signature("s", 1.5, b"{}")[:17]
    't=1,v1=b253639bcd'
    """
    stamp = str(int(at))
    return f"t={stamp},v1={_digest(secret, stamp, body)}"


def is_signed(header: str, secret: str, now: float, body: bytes) -> bool:
    """Whether the header is a signature of this body that is not too old.

    >>> header = signature("s", 1000.0, b"{}")
    >>> is_signed(header, "s", 1010.0, b"{}"), is_signed(header, "s", 2000.0, b"{}"), is_signed(header, "x", 1e3, b"{}")
    (True, False, False)
    """
    fields = dict(part.partition("=")[::2] for part in header.split(","))
    stamp, digest = fields.get("t", ""), fields.get("v1", "")
    if not (stamp.isascii() and stamp.isdigit() and digest.isascii()) or abs(now - int(stamp)) > MAX_AGE_S:
        return False
    return hmac.compare_digest(digest, _digest(secret, stamp, body))


def _digest(secret: str, stamp: str, body: bytes) -> str:
    return hmac.new(secret.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
