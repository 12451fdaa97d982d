"""Protections of a fleet, and of the programs beside its servers."""

from __future__ import annotations

from protections.mutant import Mutant

FLEET = "plugins/kvtier_fleet/kvtier_fleet/fleet.py"
FLEET_TESTS = "plugins/kvtier_fleet/tests/test_fleet.py::"

MUTANTS = (
    Mutant(
        "silent-servers-have-no-share",
        FLEET,
        "shares = len(there.told) + len(there.silent) or 1",
        "shares = len(there.told) or 1",
        FLEET_TESTS + "test_a_quota_is_shared_between_all_servers_also_those_that_do_not_answer",
    ),
    Mutant(
        "a-part-is-the-whole",
        "plugins/kvtier_fleet/kvtier_fleet/actions.py",
        "return PROBLEMS if found.silent else FINE",
        "return FINE",
        FLEET_TESTS + "test_what_was_not_erased_somewhere_is_said",
    ),
    Mutant(
        "any-server-gets-the-token",
        FLEET,
        "self._tls = _trusting(settings.ca) if settings.ca else None",
        "self._tls = ssl._create_unverified_context() if settings.ca else None",
        FLEET_TESTS + "test_over_tls_a_server_proves_who_it_is",
    ),
    Mutant(
        "programs-outlive-their-server",
        "plugins/kvtier_serve/kvtier_serve/launch.py",
        "    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)\n",
        "",
        "plugins/kvtier_serve/tests/test_programs.py::test_programs_end_with_their_server",
    ),
)
