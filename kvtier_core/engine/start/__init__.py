"""An engine's start: the reports of its workers, one layout of all ranks, and the stack."""
