"""Volumes with the owners and modes that kubelet gives them, used by a process of a pod that is not root."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pods import OPENSHIFT, ROOT, Pod

USER, GROUP, STRANGER = 1000, 2000, 3000
PYTHONPATH = os.pathsep.join(map(str, (ROOT / "tests", Path(__file__).parent)))
#: Owner, group and mode of the volume; user, group and further groups of the process.
VOLUMES = {
    "emptyDir": ((0, 0, 0o777), (USER, USER)),
    "emptyDir of a root container": ((0, 0, 0o777), (0, 0)),
    "emptyDir with fsGroup": ((0, GROUP, 0o2777), (USER, USER, (GROUP,))),
    "PVC with fsGroup": ((0, GROUP, 0o2775), (USER, USER, (GROUP,))),
    "PVC with fsGroup of a root container": ((0, GROUP, 0o2775), (0, 0, (GROUP,))),
    "PVC of a root container": ((0, 0, 0o755), (0, 0)),
    "hostPath, chowned": ((USER, USER, 0o755), (USER, USER)),
    "hostPath, sticky": ((0, 0, 0o1777), (USER, USER)),
    "NFS, squashed": ((65534, 65534, 0o777), (USER, USER)),
    "OpenShift, emptyDir": ((0, OPENSHIFT, 0o2777), (OPENSHIFT, 0, (OPENSHIFT,))),
    "OpenShift, PVC": ((0, OPENSHIFT, 0o2775), (OPENSHIFT, 0, (OPENSHIFT,))),
}
#: Those in which others may write.
IN_USE = {name: each for name, each in VOLUMES.items() if each[0][2] & 0o022}
each_volume = pytest.mark.parametrize(("volume", "user"), VOLUMES.values(), ids=VOLUMES)


def uses(pod, user, *kinds, path="/cache", apart=True, starts=1):
    """So many starts of a process that uses the volume."""
    use = f"volume_user.use({path!r}, *{kinds!r}, apart={apart})"
    pod.process("; ".join(["import volume_user", *[use] * starts]), *user, PYTHONPATH=PYTHONPATH)


def outcomes(pod):
    """What became of each use, in order."""
    lines = [line for said in pod.run() for line in said.splitlines()]
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    return [json.loads(line) for line in lines if line.startswith("{")]


@each_volume
def test_a_process_opens_everything_in_a_volume_and_finds_its_files_again(volume, user):
    pod = Pod(*volume)
    pod.process("import os; [os.mkdir(f'/cache/{kind}', 0o700) for kind in ('sockets', 'caches')]", *user)
    uses(pod, user, starts=2)
    first, second = outcomes(pod)
    assert set(first.values()) == {"new"}, first
    assert {**second, "keep": "found", "sockets": "found"} == dict.fromkeys(first, "found"), second


@pytest.mark.parametrize(("volume", "user"), IN_USE.values(), ids=IN_USE)
def test_a_tier_whose_path_is_the_volume_has_a_folder_of_its_own_in_it(volume, user):
    pod = Pod(*volume)
    uses(pod, user, "disk", "gds", "keep", apart=False, starts=2)
    pod.process("import os, json; print(json.dumps({'listed': os.listdir('/cache')}))", 0)
    first, second, listed = outcomes(pod)
    assert first == {"disk": "new", "gds": "new", "keep": "new"}
    assert second == {"disk": "found", "gds": "found", "keep": "new"}
    assert listed == {"listed": [f"kvtier-{user[0]}"]}


@pytest.mark.parametrize("path", ["/cache", "/cache/kvtier"])
def test_a_volume_that_the_process_may_not_write_to_is_refused_with_what_to_write_in_the_pods_spec(path):
    """A PVC without fsGroup, or a hostPath."""
    pod = Pod(0, 0, 0o755)
    uses(pod, (USER, USER), "disk", "shared", "gds", "keep", path=path, apart=False)
    (refused,) = outcomes(pod)
    for said in refused.values():
        assert path in said and f"securityContext: {{fsGroup: {USER}}}" in said


# -- others who may write to the volume ----------------------------------------------------------------


def as_stranger(pod, code):
    pod.process(f"import os, shutil; os.chdir('/cache'); os.umask(0); {code}", STRANGER)


#: What another user of the volume may do to the folder of a tier while its process is not there.
ATTACKS = {
    "renames it": ("os.rename('disk', 'gone')", "new"),
    "puts a folder of its own there": ("os.rename('disk', 'gone'); os.mkdir('disk', 0o777)", "user 3000"),
    "puts a link there": ("os.rename('disk', 'gone'); os.symlink('gone', 'disk')", "a link"),
    "puts a file there": ("os.rename('disk', 'gone'); open('disk', 'w').close()", "not a folder"),
    "puts another folder of this user there": (
        "os.rename('disk', 'gone'); os.rename('shared', 'disk')",
        "shared: true",
    ),
}


@pytest.mark.parametrize(("attack", "outcome"), ATTACKS.values(), ids=ATTACKS)
def test_whoever_may_write_to_the_volume_can_hide_a_folder_and_nothing_else(attack, outcome):
    pod = Pod(0, 0, 0o777)
    uses(pod, (USER, USER), "disk", "shared")
    as_stranger(pod, attack)
    uses(pod, (USER, USER), "disk")
    first, second = outcomes(pod)
    assert first == {"disk": "new", "shared": "new"}
    assert outcome in second["disk"]


def test_a_link_of_another_user_on_the_way_is_not_followed():
    """To a folder of this user's, in which a tier would then write and delete."""
    pod = Pod(0, 0, 0o777)
    pod.process("import os; os.makedirs('/tmp/precious/disk', 0o700)", USER)
    as_stranger(pod, "os.symlink('/tmp/precious', 'link')")
    uses(pod, (USER, USER), "disk", path="/cache/link")
    pod.process("import os, json; print(json.dumps(os.listdir('/tmp/precious/disk')))", USER)
    refused, listed = pod.run()[2:]
    assert "/cache/link: a link in a folder that others can write to" in refused
    assert listed == "[]"


def test_another_user_reads_no_file_in_a_folder_of_a_tier_and_puts_none_there():
    pod = Pod(0, GROUP, 0o2777)
    uses(pod, (USER, USER, (GROUP,)))
    tried = """
import os
for folder, _, _ in os.walk('/cache'):
    for tried in (os.listdir, lambda folder: open(f'{folder}/planted', 'w')):
        try:
            if folder != '/cache' and tried(folder):
                print(folder)
        except PermissionError:
            pass
"""
    pod.process(tried, STRANGER, STRANGER, (GROUP,))
    assert pod.run()[-1] == ""


# -- kubelet, at the next start of a pod ---------------------------------------------------------------


def test_frames_that_kubelet_opened_to_a_group_are_not_used_and_the_tiers_start_all_the_same():
    """It gives all that is in a volume to its fsGroup at each start, unless fsGroupChangePolicy says otherwise."""
    pod, user, kinds = Pod(0, GROUP, 0o2775), (USER, USER, (GROUP,)), ("disk", "shared", "gds", "keep", "caches")
    uses(pod, user, *kinds)
    pod.kubelet_opens(GROUP)
    uses(pod, user, *kinds, starts=2)
    pod.process("import os, json; print(json.dumps([oct(os.stat('/cache/disk').st_mode)]))", USER)
    said = pod.run()
    assert [json.loads(line) for line in "\n".join(said[:3]).splitlines() if line.startswith("{")] == [
        {**dict.fromkeys(kinds, outcome), "keep": "new"} for outcome in ("new", "new", "found")
    ]
    assert said[2].count("/cache/disk: was made writable by its group") == 1
    assert "fsGroupChangePolicy: OnRootMismatch" in said[2]
    assert json.loads(said[3]) == ["0o46700"]


def test_whoever_has_locked_what_kubelet_opened_stops_no_start():
    pod, user = Pod(0, GROUP, 0o2775), (USER, USER, (GROUP,))
    kinds = "disk", "gds", "keep"
    uses(pod, user, *kinds)
    pod.kubelet_opens(GROUP)
    lock = """
import fcntl, os, signal
for folder, _, files in os.walk("/cache"):
    for path in (folder, *(os.path.join(folder, name) for name in files)):
        fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
if not os.fork():
    with open("/tmp/holder", "w") as file:
        file.write(str(os.getpid()))
    for each in (1, 2):
        os.close(each)
    signal.alarm(600)
    signal.pause()
"""
    pod.process(lock, STRANGER, STRANGER, (GROUP,))
    uses(pod, user, *kinds, starts=2)
    pod.process("import os; os.kill(int(open('/tmp/holder').read()), 9)", 0)
    assert [each["disk"] for each in outcomes(pod)] == ["new", "new", "found"]


def test_the_folder_in_a_volume_is_the_same_whoever_may_write_to_the_volume():
    pod = Pod(USER, USER, 0o755)
    uses(pod, (USER, USER), "disk", "gds", "keep", apart=False)
    pod.process(f"import os; os.chown('/cache', {USER}, {GROUP}); os.chmod('/cache', 0o2775)", 0)
    uses(pod, (USER, USER, (GROUP,)), "disk", "gds", apart=False)
    assert outcomes(pod)[1] == {"disk": "found", "gds": "found"}


def test_a_part_of_a_volume_is_a_volume():
    """As subPath mounts it: a folder of the same file system."""
    pod = Pod(0, GROUP, 0o2775)
    mounts = f"""
import os, subprocess
os.mkdir('/cache/part')
os.chown('/cache/part', 0, {GROUP})
os.chmod('/cache/part', 0o2775)
subprocess.run(['mount', '--bind', '/cache/part', '/cache/part'], check=True)
"""
    pod.process(mounts, 0)
    uses(pod, (USER, USER, (GROUP,)), "disk", path="/cache/part", apart=False, starts=2)
    assert [each["disk"] for each in outcomes(pod)] == ["new", "found"]


def test_a_group_that_is_set_is_not_advised():
    """As by a driver of volumes that ignores fsGroup."""
    pod = Pod(0, GROUP, 0o2755)
    uses(pod, (USER, USER, (GROUP,)), "disk", path="/cache/kvtier")
    (refused,) = outcomes(pod)
    assert (
        f"let group {GROUP} write to it and name a folder in it" in refused["disk"] and "fsGroup" not in refused["disk"]
    )


def test_a_folder_that_was_opened_to_a_group_of_others_is_refused():
    pod = Pod(0, 0, 0o777)
    uses(pod, (USER, USER), "disk")
    pod.kubelet_opens(GROUP)
    uses(pod, (USER, USER), "disk")
    assert "others can write to it; run chmod go-w" in outcomes(pod)[1]["disk"]
