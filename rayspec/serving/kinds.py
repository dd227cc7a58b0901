"""What an event of a roll-over is called. Imports nothing, as the ingress reads it."""

STARTED, FOUND, POSTPONED, REFUSED = "started", "found", "postponed", "refused"
CANARY_PASSED, SWAPPED, KEPT, ROLLED_BACK = "canary_passed", "swapped", "kept", "rolled_back"
ROLLBACK_FAILED, WATCH_ENDED = "rollback_failed", "watch_ended"
KINDS = (
    *(STARTED, FOUND, POSTPONED, REFUSED, CANARY_PASSED, SWAPPED, KEPT, ROLLED_BACK),
    *(ROLLBACK_FAILED, WATCH_ENDED),
)
