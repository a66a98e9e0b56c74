"""`orch submit` where the disk of its home takes little or nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Mounts a small disk, fills it up to $1 KiB or has $2 inodes, submits, and says what is left.
SCRIPT = """
mount -t tmpfs -o size=256k,nr_inodes=$2 none "$ORCH_HOME" || exit 99
mkdir -m 700 "$ORCH_HOME/runs"
free=$(df --output=avail -k "$ORCH_HOME" | tail -1)
[ "$1" -lt "$free" ] && head -c "$(((free - $1) * 1024))" /dev/zero > "$ORCH_HOME/filled"
"$3" -m orchestrator submit nproc=1 --run-id mine -- "$3" -c 'import time; time.sleep(600)'
echo "code $?"
rm -f "$ORCH_HOME/filled"
ls "$ORCH_HOME/runs"
"$3" -m orchestrator list --json | grep -o '"run_id":"mine"' | head -1
"$3" -m orchestrator cancel mine --force > /dev/null 2>&1
exit 0
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("kib", "inodes"), [(0, 1000), (4, 1000), (16, 1000), (32, 1000), (256, 5), (256, 11)]
)
def test_a_submission_that_the_disk_does_not_take_leaves_nothing_unseen(
    tmp_path, monkeypatch, kib, inodes
):
    private = ["unshare", "--mount", "--propagation", "private"]
    if subprocess.run([*private, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    done = subprocess.run(
        [*private, "bash", "-c", SCRIPT, "-", str(kib), str(inodes), sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 99:
        pytest.skip("needs the right to mount")
    printed = done.stdout.split()
    if "0" in printed[: printed.index("code") + 2]:
        assert printed == ["local://mine", "code", "0", "mine", '"run_id":"mine"'], done
    else:
        assert printed[:2] in (["code", "76"], ["code", "65"]), done
        assert printed[2:] in ([], ["mine", '"run_id":"mine"']), done
        assert done.stderr.count("\n") == 1 and "No space left on device" in done.stderr, done
