"""paramiko without `invoke`, which would take 0.1 s of each verb.

paramiko looks for it for one directive of an ssh_config, `Match exec`, that ours never has, and does without
where there is none.
"""

import sys

_HIDDEN = "invoke" not in sys.modules
if _HIDDEN:
    sys.modules["invoke"] = None  # type: ignore[assignment]
import paramiko as paramiko  # noqa: E402, PLC0414 - handed on

if _HIDDEN:
    del sys.modules["invoke"]
