"""The plugins."""

from __future__ import annotations

from protections.mutant import Mutant

DISK = "plugins/kvtier_disk/kvtier_disk"
REDIS = "plugins/kvtier_redis/kvtier_redis"
REDIS_CAPACITY = "plugins/kvtier_redis/tests/test_redis_capacity.py::"
MOONCAKE = "plugins/kvtier_mooncake/kvtier_mooncake"
MOONCAKE_TESTS = "plugins/kvtier_mooncake/tests/test_mooncake.py::"
S3 = "plugins/kvtier_s3/kvtier_s3"
S3_CAPACITY = "plugins/kvtier_s3/tests/test_s3_capacity.py::"
GDS = "plugins/kvtier_gds/kvtier_gds"
PEERS = "plugins/kvtier_peers/kvtier_peers"
PEERS_TESTS = "plugins/kvtier_peers/tests/test_peers.py::"
PEERS_DIGESTS = "plugins/kvtier_peers/tests/test_peers_digests.py::"
PEERS_ACCOUNTS = "plugins/kvtier_peers/tests/test_peers_accounts.py::"
SHOWN_TESTS = "tests/relays/test_shown_frames.py::"
LOSSY = "plugins/kvtier_lossy/kvtier_lossy"
LOSSY_TESTS = "plugins/kvtier_lossy/tests/test_lossy_layouts.py::"
GDS_TESTS = "plugins/kvtier_gds/tests/test_gds.py::"
GDS_TABLE = "plugins/kvtier_gds/tests/test_gds_table.py::"
GDS_TROUBLE = "plugins/kvtier_gds/tests/test_gds_trouble.py::"
OPENED_DISKS = "plugins/kvtier_disk/tests/test_disk_opened.py::"
DISK_TESTS = "plugins/kvtier_disk/tests/test_disk.py::"
DISK_SECURITY = "plugins/kvtier_disk/tests/test_disk_security.py::"
SHARED_DISK = "plugins/kvtier_disk/tests/test_shared_disk.py::"
SHARED_CAPACITY = "plugins/kvtier_disk/tests/test_shared_capacity.py::"

KEEP = "plugins/kvtier_cpu/tests/test_cpu_keep.py::"

RECORDING = "plugins/kvtier_simulate/kvtier_simulate/recording.py"
RECORDING_TESTS = "plugins/kvtier_simulate/tests/test_recording_observer.py::"

MUTANTS = (
    Mutant(
        "kept-memory-without-room",
        "plugins/kvtier_cpu/kvtier_cpu/segment.py",
        "if system.f_blocks and placement.nbytes > room:",
        "if False:",
        KEEP + "test_memory_that_is_kept_outlives_a_larger_capacity_that_does_not_fit",
    ),
    Mutant(
        "half-of-the-memory-stays",
        "plugins/kvtier_cpu/kvtier_cpu/segment.py",
        "undo.callback(folder.remove, _NAME)",
        "pass",
        KEEP + "test_memory_that_fails_half_way_leaves_nothing_allocated",
    ),
    Mutant(
        "peers-that-hang-are-asked-again",
        PEERS + "/peer.py",
        "self._connected = self._connecting = False",
        "self._connecting = False",
        PEERS_TESTS + "test_a_peer_that_hangs_costs_one_call_its_patience",
    ),
    Mutant(
        "frames-change-while-they-are-sent",
        PEERS + "/listener.py",
        "is_whole = self._find(namespace, key) is frame",
        "is_whole = True",
        PEERS_TESTS + "test_a_frame_whose_slot_is_used_again_while_it_is_sent_is_a_miss",
    ),
    Mutant(
        "evicted-frames-are-shown",
        "kvtier_core/stack/arena.py",
        "        self.hide(keys)\n        places",
        "        places",
        SHOWN_TESTS + "test_sealed_frames_are_shown_until_they_are_evicted",
    ),
    Mutant(
        "invalidated-frames-are-shown",
        "kvtier_core/stack/arena.py",
        "        self.hide(self.index.resident)\n",
        "",
        SHOWN_TESTS + "test_invalidated_frames_are_hidden_even_while_in_use",
    ),
    Mutant(
        "lossy-frames-are-shown",
        "kvtier_core/stack/arena.py",
        "for key in self.exact(keys):",
        "for key in keys:",
        SHOWN_TESTS + "test_frames_from_a_lossy_codec_are_not_shown",
    ),
    Mutant(
        "any-token",
        PEERS + "/link.py",
        "return hmac.compare_digest(self.receive(len(proof)), proof)",
        "return len(self.receive(len(proof))) == len(proof)",
        PEERS_TESTS + "test_only_who_knows_the_token_is_shown_a_frame",
    ),
    Mutant(
        "damaged-frames-of-peers-hide-whole-ones",
        PEERS + "/backend.py",
        "            peer.blame()\n",
        "            pass\n",
        PEERS_TESTS + "test_a_frame_that_one_peer_has_damaged_is_read_whole_from_another",
    ),
    Mutant(
        "any-account-of-the-machine-feeds-peers",
        PEERS + "/link.py",
        "secret = _secret_of_account(make=not ctx.checking) if of_account else token",
        "secret = token",
        PEERS_ACCOUNTS + "test_another_account_that_listens_where_a_peer_did_feeds_no_one",
    ),
    Mutant(
        "proofs-of-an-account-are-passed-on",
        PEERS + "/link.py",
        ' + (repr(addresses).encode() if self.of_account else b"")',
        "",
        PEERS_ACCOUNTS + "test_who_stands_between_two_nodes_of_an_account_cannot_pass_their_proofs_on",
    ),
    Mutant(
        "silent-peers-are-waited-for-over-tls",
        PEERS + "/link.py",
        "            self._sock.settimeout(seconds or None)\n",
        "",
        PEERS_TESTS + "test_a_connection_to_a_silent_peer_is_given_up",
    ),
    Mutant(
        "shown-beyond-loopback",
        PEERS + "/listener.py",
        "if not door.opens_to(self._sock.getsockname()[0]):",
        "if False:",
        PEERS_TESTS + "test_beyond_loopback_nothing_is_shown_without_a_token_or_tls",
    ),
    Mutant(
        "shown-to-any-namespace",
        PEERS + "/listener.py",
        "for shown in self.shown if shown.namespace == namespace]",
        "for shown in self.shown]",
        PEERS_TESTS + "test_frames_of_another_namespace_are_not_shown",
    ),
    Mutant(
        "memory-goes-while-it-is-read",
        PEERS + "/listener.py",
        "self._changed.wait_for(lambda: before.isdisjoint(self._looks))",
        "pass",
        PEERS_TESTS + "test_a_node_that_closes_waits_for_who_reads",
    ),
    Mutant(
        "digests-have-gaps",
        PEERS + "/table.py",
        "changes.base not in (0, known.version) or not changes.version",
        "not changes.version",
        PEERS_DIGESTS + "test_after_changes_that_were_lost_all_of_the_digest_is_sent",
    ),
    Mutant(
        "digests-contradict-themselves",
        PEERS + "/table.py",
        "if gone < len(changes.gone) or come:",
        "if False:",
        PEERS_DIGESTS + "test_changes_that_cannot_be_are_refused_and_change_nothing",
    ),
    Mutant(
        "digests-have-no-end",
        PEERS + "/table.py",
        "if length > MOST_CHUNKS:",
        "if False:",
        PEERS_DIGESTS + "test_changes_that_cannot_be_are_refused_and_change_nothing",
    ),
    Mutant(
        "two-nodes-have-one-number",
        PEERS + "/table.py",
        "if (free := each % _MOST_NODES) not in self._nodes)",
        "if (free := each % _MOST_NODES) >= 0)",
        PEERS_DIGESTS + "test_two_nodes_never_have_one_number",
    ),
    Mutant(
        "digests-of-nodes-that-left",
        PEERS + "/table.py",
        "self._keep(set(self._nodes))",
        "pass",
        PEERS_DIGESTS + "test_a_number_that_is_given_again_brings_nothing_of_the_node_before",
    ),
    Mutant(
        "chunks-that-went-are-still-shown",
        PEERS + "/table.py",
        "found ^= {",
        "found |= {",
        PEERS_DIGESTS + "test_a_table_knows_what_each_node_shows_however_often_it_merges_changes",
    ),
    Mutant(
        "digests-are-received-however-long",
        PEERS + "/link.py",
        "if max(gone, come) > MOST_CHUNKS:",
        "if False:",
        PEERS_DIGESTS + "test_a_digest_that_is_too_long_is_refused_before_it_is_received",
    ),
    Mutant(
        "changes-are-remembered-for-ever",
        PEERS + "/digest.py",
        "while self._past_length > len(self._keys) or len(self._past) > _MOST_PAST:",
        "while False:",
        PEERS_DIGESTS + "test_changes_are_no_longer_than_all_of_it_however_much_it_changes",
    ),
    Mutant(
        "the-digest-of-another-node",
        PEERS + "/peer.py",
        "if boot != self._boot:",
        "if False:",
        PEERS_DIGESTS + "test_a_node_that_took_the_place_of_another_is_not_believed_to_have_its_frames",
    ),
    Mutant(
        "silent-peers-are-believed",
        PEERS + "/link.py",
        "self._limit(socket.SO_RCVTIMEO, within + self._patience)",
        "self._limit(socket.SO_RCVTIMEO, 0)",
        PEERS_TESTS + "test_a_peer_that_is_silent_has_nothing",
    ),
    Mutant(
        "codes-leave-bytes-of-a-page-out",
        LOSSY + "/halves.py",
        "if any(nbytes != DTYPES[group.dtype].itemsize * _covered(group.elements) for nbytes in group.page_nbytes):",
        "if False:",
        LOSSY_TESTS + "test_a_layout_that_no_codec_knows_is_refused",
    ),
    Mutant(
        "parts-of-one-length-are-alike",
        LOSSY + "/halves.py",
        "if found.setdefault(part.payload_nbytes, halves) != halves:",
        "if not found.setdefault(part.payload_nbytes, halves):",
        LOSSY_TESTS + "test_parts_of_one_length_must_be_alike",
    ),
    Mutant(
        "lossy-codes-of-any-length",
        LOSSY + "/coding.py",
        "if len(encoded) != nbytes:",
        "if False:",
        LOSSY_TESTS + "test_a_harmed_encoding_is_refused_or_decodes_to_numbers",
    ),
    Mutant(
        "streams-end-anywhere",
        LOSSY + "/rans.py",
        "return symbols if used == len(words) and (states == _LOW).all() else None",
        "return symbols",
        LOSSY_TESTS + "test_a_harmed_encoding_is_refused_or_decodes_to_numbers",
    ),
    Mutant(
        "quarantine-without-end",
        DISK + "/backend.py",
        "if nbytes and kept + nbytes <= self._quarantine_nbytes:",
        "if nbytes:",
        "plugins/kvtier_disk/tests/test_disk.py::test_damaged_frames_are_kept_aside_until_there_are_too_many",
    ),
    Mutant(
        "any-length-is-a-frames",
        DISK + "/backend.py",
        "return found.nbytes <= (self._longest if found.namespace_folder == self._name else self._capacity)",
        "return True",
        DISK_TESTS + "test_a_file_of_impossible_length_is_no_frame",
    ),
    Mutant(
        "written-in-place",
        DISK + "/frames.py",
        'return f"{stem}.{writer}{_UNFINISHED}" if writer else f"{stem}{_UNFINISHED}"',
        "return name",
        "plugins/kvtier_disk/tests/test_disk.py::test_a_writer_that_dies_half_way_leaves_nothing_under_the_name",
    ),
    Mutant(
        "a-frame-that-goes-stops-the-scan",
        f"{DISK}/frames.py",
        "except FileNotFoundError:  # deleted, or written whole, since it was listed",
        "except NotImplementedError:",
        "plugins/kvtier_disk/tests/test_disk_laws.py::"
        "test_a_frame_that_is_deleted_while_the_folder_is_listed_stops_no_scan",
    ),
    Mutant(
        "a-file-of-others-is-a-frame",
        DISK + "/frames.py",
        "if why_no_file(status) or",
        "if",
        DISK_SECURITY + "test_open_removes_what_stands_for_a_frame_and_follows_none",
    ),
    Mutant(
        "no-sweep",
        DISK + "/backend.py",
        "                place.remove(root)\n        elif",
        "                pass\n        elif",
        "plugins/kvtier_disk/tests/test_disk.py::test_open_removes_what_is_no_frame",
    ),
    Mutant(
        "a-sweep-removes-what-is-called-like-a-namespace",
        DISK + "/backend.py",
        "if name == own or is_kvtiers(root, name)]",
        "]",
        DISK_TESTS + "test_open_leaves_alone_what_kvtier_has_not_made",
    ),
    Mutant(
        "forgets-a-file",
        DISK + "/folder_backend.py",
        "[found for _, found in everything_of(root, self._name)]",
        "[found for _, found in everything_of(root, self._name)][1:]",
        "plugins/kvtier_disk/tests/test_disk_laws.py",
    ),
    Mutant(
        "room-that-a-failed-write-keeps",
        DISK + "/folder_backend.py",
        "except BaseException as error:  # OSError, or BackendError for a folder that others may write to",
        "except OSError as error:",
        "plugins/kvtier_disk/tests/test_space_account.py::test_the_account_agrees_with_the_disk_wherever_it_fails",
    ),
    Mutant(
        "replicas-share-a-folder",
        "kvtier_core/storekit/folder.py",
        "if ctx.replicas > 1 else path",
        "if False else path",
        "plugins/kvtier_disk/tests/test_fsck.py::test_an_engine_alone_leaves_the_folders_of_several_alone",
    ),
    Mutant(
        "room-that-is-not-there",
        DISK + "/space_account.py",
        "            if missing > 0:\n                raise StoreFull(",
        "            if False:\n                raise StoreFull(",
        "plugins/kvtier_disk/tests/test_space_account.py::test_a_frame_in_the_way_that_cannot_be_removed_is_a_full_store",
    ),
    Mutant(
        "an-account-without-a-lock",
        "kvtier_core/storekit/folder_lock.py",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        SHARED_CAPACITY + "test_three_processes_never_exceed_the_capacity_and_the_oldest_leave",
    ),
    Mutant(
        "the-newest-leave",
        DISK + "/shared_account.py",
        "in oldest_first(frames) if",
        "in reversed(oldest_first(frames)) if",
        SHARED_CAPACITY + "test_the_oldest_leave_of_whatever_namespace_and_writer",
    ),
    Mutant(
        "an-engine-that-makes-room-is-a-broken-store",
        DISK + "/shared_account.py",
        "raise StoreFull(str(error), missing=0) from None",
        "raise",
        "plugins/kvtier_disk/tests/test_shared_capacity.py::test_an_engine_that_holds_a_lock_keeps_no_other_for_ever",
    ),
    Mutant(
        "what-is-replaced-counts-for-ever",
        DISK + "/shared.py",
        "            if self.space is not None:\n                # Whoever",
        "            if False:\n                # Whoever",
        SHARED_CAPACITY + "test_replaced_and_deleted_frames_return_their_space",
    ),
    Mutant(
        "one-key-fails-all-of-a-shared-folder",
        DISK + "/shared.py",
        "if not _may_be_of_one_key(error) or not self._works():",
        "if True:",
        SHARED_DISK + "test_a_key_that_cannot_be_read_fails_alone",
    ),
    Mutant(
        "one-name-for-all-writers",
        DISK + "/shared.py",
        "writer=_this_writer()",
        'writer="writer"',
        SHARED_DISK + "test_an_unfinished_file_tells_whose_it_is",
    ),
    Mutant(
        "any-folder-is-the-shared-one",
        DISK + "/shared_folder.py",
        "if status.st_dev != known.st_dev and not is_shared(folder):",
        "if False:",
        SHARED_DISK + "test_what_lies_below_the_mount_point_is_not_used",
    ),
    Mutant(
        "a-shared-folder-is-swept",
        DISK + "/shared_folder.py",
        "    if is_shared(folder):\n",
        "    if False:\n",
        SHARED_DISK + "test_an_engine_that_wants_it_for_itself_is_refused",
    ),
    Mutant(
        "fsck-removes-what-is-being-written",
        DISK + "/walk.py",
        "if listed.status.st_mtime < before or not listed.is_unfinished",
        "if True",
        "plugins/kvtier_disk/tests/test_shared_fsck.py::test_an_unfinished_write_is_not_damage",
    ),
    Mutant(
        "frames-without-facts-take-no-room",
        DISK + "/namespaces.py",
        "is_made_folder(root.status(name)) or read_facts(",
        "read_facts(",
        DISK_TESTS + "test_a_namespace_without_facts_is_known_by_its_mark",
    ),
    Mutant(
        "opened-frames-of-a-shared-folder-take-room",
        DISK + "/shared_folder.py",
        "        folder.clear_opened()\n",
        "",
        OPENED_DISKS + "test_capacity_holds_over_passes_and_models[shared]",
    ),
    Mutant(
        "opened-frames-give-no-bytes-back",
        DISK + "/frames.py",
        "status.st_uid == os.geteuid() and status.st_nlink == 1",
        "not why_no_file(status)",
        OPENED_DISKS + "test_a_running_disk_gets_back_the_bytes_of_opened_frames",
    ),
    Mutant(
        "facts-of-any-namespace",
        "kvtier_core/storekit/namespaces.py",
        "return namespace if home_of(namespace).startswith(home) else None",
        "return namespace",
        DISK_TESTS + "test_odd_facts_are_passed_over",
    ),
    Mutant(
        "a-slab-remembers-what-was-deleted",
        GDS + "/backend.py",
        "self._delete(keys, lambda place: place.slab.clear(place))",
        "self._delete(keys, lambda place: None)",
        GDS_TESTS + "test_deleted_frames_stay_deleted_after_a_kill",
    ),
    Mutant(
        "a-record-before-its-frame",
        GDS + "/backend.py",
        "            unused = dict(enumerate(places))\n",
        "            unused = dict(enumerate(places))\n"
        "            for key, place in zip(keys, places, strict=True):\n"
        "                self._publish(key, place)\n",
        GDS_TESTS + "test_a_kill_in_an_overwrite_leaves_neither_frame",
    ),
    Mutant(
        "one-bad-place-retires-its-batch",
        GDS + "/backend.py",
        "                    if failures[i] is None:\n                        failures[i] = self._publish",
        "                    if not any(failures):\n                        failures[i] = self._publish",
        GDS_TROUBLE + "test_of_a_batch_only_the_place_that_fails_is_retired",
    ),
    Mutant(
        "a-bad-place-is-bad-for-ever",
        GDS + "/backend.py",
        "if since <= until]",
        "if False]",
        GDS_TROUBLE + "test_a_place_is_tried_again_when_the_drive_has_recovered",
    ),
    Mutant(
        "a-bad-place-is-used-again",
        GDS + "/backend.py",
        "                self._retire([unused.pop(i) for i in list(unused)])\n",
        "",
        GDS_TROUBLE + "test_a_place_that_takes_no_frame_is_not_tried_again",
    ),
    Mutant(
        "slabs-of-all-namespaces",
        GDS + "/backend.py",
        'found["namespace"] == np.void(self._namespace.digest)',
        'found["nbytes"] > 0',
        GDS_TESTS + "test_frames_of_others_leave_for_what_has_no_room_oldest_first",
    ),
    Mutant(
        "two-frames-in-one-place",
        GDS + "/table.py",
        "        if not kept or end[kept[-1]] <= at[i]:\n",
        "        if True:\n",
        GDS_TESTS + "test_of_records_that_overlap_the_newer_counts",
    ),
    Mutant(
        "slabs-whose-frames-never-overlap",
        GDS + "/table.py",
        '(ends[:-1] <= found["at"][1:]).all()',
        "True",
        GDS_TESTS + "test_of_records_that_overlap_the_newer_counts",
    ),
    Mutant(
        "a-frame-that-ends-before-it-begins",
        GDS + "/table.py",
        '(found["nbytes"] <= nbytes) & (found["at"] <= nbytes - found["nbytes"])',
        'found["at"] + found["nbytes"] <= nbytes',
        GDS_TABLE + "test_a_frame_does_not_end_before_it_begins",
    ),
    Mutant(
        "any-record-is-believed",
        GDS + "/table.py",
        'numbers = numbers[records["checksum"][numbers] == np.array(checksums, "<u4")]',
        "pass",
        GDS_TESTS + "test_every_bit_of_a_record_counts",
    ),
    Mutant(
        "an-eviction-lists-all-frames",
        "plugins/kvtier_redis/kvtier_redis/account.py",
        "SharedSpace(self, capacity, most_listed=_MOST_LISTED)",
        "SharedSpace(self, capacity)",
        "plugins/kvtier_redis/tests/test_redis_capacity.py"
        "::test_an_eviction_among_two_hundred_thousand_frames_lists_a_part_and_removes_few",
    ),
    Mutant(
        "pages-by-rank",
        "plugins/kvtier_redis/kvtier_redis/account.py",
        "limit = _PAGE + len(seen)",
        "limit = _PAGE",
        "plugins/kvtier_redis/tests/test_redis_capacity.py"
        "::test_a_ledger_is_read_in_pages_though_entries_of_one_time_and_others_leave",
    ),
    Mutant(
        "a-broken-write-is-given-back",
        REDIS + "/writing.py",
        " and not self._transfers[number].left",
        "",
        REDIS_CAPACITY + "test_connections_that_break_in_a_write_never_exceed_it",
    ),
    Mutant(
        "a-refused-unlink-is-given-back",
        REDIS + "/backend.py",
        "(answer, unlinked.get(number))",
        "(answer,)",
        REDIS_CAPACITY + "test_parts_that_the_server_refuses_to_unlink_stay_counted",
    ),
    Mutant(
        "objects-of-one-length",
        MOONCAKE + "/client_process.py",
        "lengths[i] + 1 + secrets.randbelow(FRAME_ALIGNMENT - 1)",
        "lengths[i] + 1",
        MOONCAKE_TESTS + "test_a_frame_is_not_written_in_place_of_another",
    ),
    Mutant(
        "deleted-memory-is-used-at-once",
        MOONCAKE + "/client_process.py",
        "codes = self._upsert(number, names, [0] * len(names), [1] * len(names))",
        "codes = [0] * len(names)",
        MOONCAKE_TESTS + "test_the_memory_of_a_deleted_frame_is_not_used_at_once",
    ),
    Mutant(
        "a-length-tells-frames",
        MOONCAKE + "/client_process.py",
        " and _memcmp(here, there, nbytes) == 0",
        "",
        MOONCAKE_TESTS + "test_a_frame_that_differs_in_one_byte_is_replaced",
    ),
    Mutant(
        "a-late-lane-is-used-again",
        MOONCAKE + "/client.py",
        "(self._late if lane.is_late else self._free).put(lane)",
        "self._free.put(lane)",
        "plugins/kvtier_mooncake/tests/test_mooncake_trouble.py::test_a_late_answer_is_not_taken_for_the_next",
    ),
    Mutant(
        "an-unanswered-write-is-given-back",
        S3 + "/writes.py",
        "self.growth if isinstance(error, Unanswered) else 0",
        "0",
        S3_CAPACITY + "test_frames_that_were_stored_and_not_answered_are_counted",
    ),
    Mutant(
        "a-write-that-met-itself-is-given-back",
        S3 + "/writes.py",
        "if found.meta.get(_WRITE) == write.nonce:",
        "if False:",
        S3_CAPACITY + "test_a_conditional_write_that_meets_itself_is_counted",
    ),
    Mutant(
        "a-sample-is-taken-for-all",
        S3 + "/space.py",
        "        if not whole:",
        "        if False:",
        S3_CAPACITY + "test_an_account_that_was_lost_is_counted_from_all_frames",
    ),
    Mutant(
        "only-the-heads-of-folders-are-sampled",
        S3 + "/bucket.py",
        "{digit}{drawn[0]}/{digit}{drawn}",
        "{digit}{drawn}",
        S3_CAPACITY + "test_any_frame_may_be_drawn",
    ),
    Mutant(
        "recordings-have-what-is-stored-in-memory-only",
        RECORDING,
        "[] if arrived.why else [",
        "[",
        RECORDING_TESTS + "test_what_is_stored_in_memory_only_has_no_ids",
    ),
    Mutant(
        "one-salt-for-all-recordings",
        RECORDING,
        "secrets.token_bytes(32)",
        'b"salt"',
        RECORDING_TESTS + "test_no_recording_can_be_laid_beside_another",
    ),
    Mutant(
        "recordings-for-everyone",
        "kvtier_core/storekit/trial.py",
        "os.O_EXCL | os.O_CLOEXEC, 0o600)",
        "os.O_EXCL | os.O_CLOEXEC, 0o644)",
        RECORDING_TESTS + "test_a_recording_is_readable_by_its_user_alone",
    ),
    Mutant(
        "recordings-without-end",
        RECORDING,
        "self._room -= len(text)",
        "pass",
        RECORDING_TESTS + "test_a_recording_stays_within_its_capacity_over_all_starts",
    ),
)
