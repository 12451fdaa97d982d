"""What stores share: folders, locks, disks, capacity."""

from __future__ import annotations

from protections.mutant import Mutant

STOREKIT = "kvtier_core/storekit"
GDS_SECURITY = "plugins/kvtier_gds/tests/test_gds_security.py::"
DISK_SECURITY = "plugins/kvtier_disk/tests/test_disk_security.py::"
DISK_TROUBLE = "plugins/kvtier_disk/tests/test_disk_trouble.py::"
SHARED_SPACE = "kvtier_core/storekit/shared_space.py"
SHARED_SPACE_TESTS = "tests/storekit/test_shared_space.py::"
BESIDE = "plugins/kvtier_vllm/tests/test_beside_others.py::"
OPENED_SLABS = "plugins/kvtier_gds/tests/test_gds_opened.py::"
VOLUMES = "plugins/kvtier_serve/tests/test_volumes.py::"

MUTANTS = (
    Mutant(
        "two-processes-replace-a-socket",
        "kvtier_core/storekit/owner_socket.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX)\n",
        "",
        "tests/storekit/test_owner_socket.py::test_of_many_that_start_over_an_abandoned_socket_one_listens",
    ),
    Mutant(
        "a-fork-closes-its-parents",
        "kvtier_core/forks.py",
        "if self.__process == _process() else",
        "if True else",
        "tests/engine/test_forks.py::test_a_forked_child_closes_nothing_of_its_parents[folder lock]",
    ),
    Mutant(
        "a-fork-has-its-parents-number",
        "kvtier_core/forks.py",
        "    _forks += 1\n",
        "    pass\n",
        "tests/engine/test_forks.py::test_a_child_with_the_number_of_its_parent_closes_nothing",
    ),
    Mutant(
        "a-fork-closes-a-plugins-object",
        "kvtier_core/forks.py",
        "        if _process() == here:\n",
        "        if True:\n",
        "tests/engine/test_closing_plugins.py::test_a_fork_of_an_opening_tier_closes_no_other",
    ),
    Mutant(
        "one-frames-failure-is-everybodys",
        STOREKIT + "/disk_access.py",
        "if failure.errno not in OF_ONE_FRAME:",
        "if True:",
        DISK_TROUBLE + "test_a_bad_sector_is_one_frames_alone",
    ),
    Mutant(
        "a-dead-device-is-a-bad-frame",
        STOREKIT + "/disk_access.py",
        "            probe_device(folder)\n",
        "            pass\n",
        DISK_TROUBLE + "test_a_device_that_fails_and_comes_back",
    ),
    Mutant(
        "errors-of-the-system-escape",
        STOREKIT + "/folder.py",
        'raise BackendError(f"{error.filename or path}: {error.strerror}") from error',
        "raise",
        "plugins/kvtier_disk/tests/test_disk_trouble.py",
    ),
    Mutant(
        "files-for-everyone",
        STOREKIT + "/folder.py",
        "if marked else 0o600,",
        "if marked else 0o644,",
        "plugins/kvtier_disk/tests/test_disk.py::test_names_come_from_keys_and_no_other_user_may_look",
    ),
    Mutant(
        "follows-links",
        STOREKIT + "/folder.py",
        "if stat.S_ISLNK(status.st_mode):",
        "if False:",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_link_is_refused",
    ),
    Mutant(
        "folders-of-others",
        STOREKIT + "/folder.py",
        "    if status.st_uid != os.geteuid():",
        "    if False:",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_folder_of_another_user_is_refused",
    ),
    Mutant(
        "folders-for-others",
        STOREKIT + "/folder.py",
        "    if status.st_mode & 0o022:\n",
        "    if False:\n",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_folder_that_others_may_write_to_is_refused",
    ),
    Mutant(
        "a-sticky-folder-is-the-tiers-alone",
        STOREKIT + "/folder.py",
        "    if status.st_mode & 0o022:\n",
        "    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:\n",
        GDS_SECURITY + "test_a_sticky_folder_is_refused_whatever_a_stranger_put_there",
    ),
    Mutant(
        "files-of-others",
        STOREKIT + "/folder.py",
        "elif status.st_uid != os.geteuid():",
        "elif False:",
        GDS_SECURITY + "test_a_strangers_file_is_not_adopted_when_the_folder_is_closed_to_others",
    ),
    Mutant(
        "files-open-to-others",
        STOREKIT + "/folder.py",
        "elif status.st_mode & 0o077:",
        "elif False:",
        GDS_SECURITY + "test_a_file_that_is_not_the_tiers_alone_is_refused_untouched",
    ),
    Mutant(
        "files-with-another-name",
        STOREKIT + "/folder.py",
        "elif status.st_nlink > 1:",
        "elif False:",
        GDS_SECURITY + "test_a_file_that_is_not_the_tiers_alone_is_refused_untouched",
    ),
    Mutant(
        "any-link-on-the-way",
        STOREKIT + "/folder.py",
        "        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:\n",
        "        if False:\n",
        DISK_SECURITY + "test_a_link_on_the_way_is_followed_only_where_no_other_user_could_have_put_it",
    ),
    Mutant(
        "a-volume-is-the-tiers-folder",
        STOREKIT + "/folder.py",
        "shared = os.path.ismount(path) and path.lstat().st_mode & 0o022",
        "shared = False",
        VOLUMES + "test_a_tier_whose_path_is_the_volume_has_a_folder_of_its_own_in_it",
    ),
    Mutant(
        "slabs-that-a-group-may-have-changed",
        "plugins/kvtier_gds/kvtier_gds/slab.py",
        "                self.folder.remove_opened(name)\n",
        "                pass\n",
        VOLUMES + "test_frames_that_kubelet_opened_to_a_group_are_not_used_and_the_tiers_start_all_the_same",
    ),
    Mutant(
        "folders-that-any-group-may-write-to",
        STOREKIT + "/folder.py",
        "        return opened and status.st_gid in (os.getegid(), *os.getgroups())\n",
        "        return opened\n",
        VOLUMES + "test_a_folder_that_was_opened_to_a_group_of_others_is_refused",
    ),
    Mutant(
        "a-running-tier-trusts-an-opened-slab",
        "plugins/kvtier_gds/kvtier_gds/backend.py",
        "            slab.must_be_ours()\n",
        "            pass\n",
        OPENED_SLABS + "test_no_forged_frame_is_read_whenever_the_files_are_opened",
    ),
    Mutant(
        "a-worker-trusts-an-opened-slab",
        "plugins/kvtier_gds/kvtier_gds/slab_files.py",
        "        self.must_be_ours()\n",
        "",
        OPENED_SLABS + "test_no_forged_frame_is_read_whenever_the_files_are_opened",
    ),
    Mutant(
        "a-slab-that-is-closed-again-is-trusted",
        "plugins/kvtier_gds/kvtier_gds/slab.py",
        "            self._abandon()\n",
        "",
        OPENED_SLABS + "test_a_slab_that_was_seen_open_is_never_used_again",
    ),
    Mutant(
        "a-worker-forgets-that-a-slab-was-open",
        "plugins/kvtier_gds/kvtier_gds/slab_files.py",
        "self._opened = self._opened or why_no_file(status)",
        "self._opened = why_no_file(status)",
        OPENED_SLABS + "test_a_worker_that_saw_a_slab_open_never_reads_it_again",
    ),
    Mutant(
        "a-file-that-is-opened-while-it-is-read-is-trusted",
        "plugins/kvtier_disk/kvtier_disk/files.py",
        "if why else outcome",
        "if False else outcome",
        "plugins/kvtier_disk/tests/test_disk_opened.py::test_no_forged_frame_is_read_whenever_the_files_are_opened",
    ),
    Mutant(
        "any-opened-folder-is-closed",
        STOREKIT + "/folder.py",
        "and found._is_opened() and made",
        "and found._is_opened()",
        "tests/storekit/test_folder.py::test_only_a_folder_that_kvtier_made_is_closed_and_only_when_it_is_opened",
    ),
    Mutant(
        "whatever-has-the-name-is-removed",
        STOREKIT + "/folder.py",
        "            if not is_made(self.status(name)):\n",
        "            if False:\n",
        "tests/storekit/test_folder.py::test_only_a_file_with_the_mark_is_removed_as_kvtiers",
    ),
    Mutant(
        "a-socket-has-its-name-before-it-listens",
        "kvtier_core/storekit/owner_socket.py",
        '    unready = Path(f"{path}"[:-1] + _NEW)\n',
        "    unready = path\n",
        "tests/storekit/test_owner_socket.py::test_a_name_is_there_when_its_owner_listens_and_nobody_else_may_connect",
    ),
    Mutant(
        "memory-of-any-folder",
        "plugins/kvtier_serve/kvtier_serve/kept/journal.py",
        "        if inode not in [entry.inode() for entry in self._folder.entries()]:\n",
        "        if False:\n",
        "plugins/kvtier_serve/tests/test_kept_memory.py::test_memory_of_another_folder_than_the_locked_one_is_not_used",
    ),
    Mutant(
        "a-missing-tier-is-always-optional",
        "kvtier_core/config/open.py",
        "        if isinstance(opening.tier, ArenaTierConfig) or opening.tier.required:\n",
        "        if isinstance(opening.tier, ArenaTierConfig):\n",
        "tests/config/test_config.py::test_all_tiers_open_or_none_and_every_reason_is_reported",
    ),
    Mutant(
        "any-folder-inside",
        STOREKIT + "/folder.py",
        "        must_be_ours(os.fstat(fd), *inner._called)\n",
        "",
        DISK_SECURITY + "test_a_folder_put_in_place_of_the_tiers_is_never_read",
    ),
    Mutant(
        "opens-before-it-looks",
        STOREKIT + "/folder.py",
        "self._must_be_file(name, self.status(name))",
        "pass",
        DISK_SECURITY + "test_only_a_regular_file_is_a_frame",
    ),
    Mutant(
        "reports-of-others",
        STOREKIT + "/folder.py",
        "    if status.st_uid != os.geteuid():",
        "    if False:",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-for-others",
        STOREKIT + "/folder.py",
        "    if status.st_mode & 0o022:\n",
        "    if False:\n",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "reports-behind-a-link",
        STOREKIT + "/folder.py",
        "if not names or links > _MAX_LINKS:",
        "if links > _MAX_LINKS:",
        BESIDE + "test_a_folder_that_others_could_write_to_is_not_believed",
    ),
    Mutant(
        "what-is-under-way-is-lost",
        SHARED_SPACE,
        "listed + max(count.taken - settled, taken)",
        "listed + taken",
        SHARED_SPACE_TESTS + "test_space_of_writes_under_way_is_not_reclaimed",
    ),
    Mutant(
        "what-a-killed-user-took-is-lost-for-ever",
        SHARED_SPACE,
        "return taken if self._clock() - seen >= _SETTLED else 0",
        "return 0",
        SHARED_SPACE_TESTS + "test_space_taken_by_a_killed_user_comes_back",
    ),
    Mutant(
        "what-was-taken-in-advance-never-lapses",
        SHARED_SPACE,
        "            if self._clock() >= self._lapses:\n",
        "            if False:\n",
        SHARED_SPACE_TESTS + "test_space_that_an_idle_user_took_in_advance_lapses",
    ),
    Mutant(
        "any-folder-at-the-path",
        STOREKIT + "/folder_lock.py",
        "if os.path.samestat(status, os.fstat(held.fd)):",
        "if True:",
        DISK_SECURITY + "test_a_folder_put_in_place_of_the_tiers_is_never_read",
    ),
)
