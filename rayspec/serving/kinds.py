"""What an event of a roll-over is called. Imports nothing, as the ingress reads it."""

KINDS = (
    *(STARTED := "started", FOUND := "found", POSTPONED := "postponed", REFUSED := "refused"),
    *(CANARY_PASSED := "canary_passed", SWAPPED := "swapped", KEPT := "kept", ROLLED_BACK := "rolled_back"),
    *(ROLLBACK_FAILED := "rollback_failed", WATCH_ENDED := "watch_ended"),
)
