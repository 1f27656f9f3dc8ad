import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"

# As Slurm's, in what the script uses of them. Hosts are loopback addresses: a node finds its own.
STUBS = {
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "127.0.0.1\\n127.0.0.2\\n"',
    "srun": """echo "$@" > srun.args
while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" || exit; done""",
    # Runs what looks up addresses, sees GPUs, and notes what would be launched.
    "python": f"""case $1 in
  -) exec {sys.executable} "$@" ;;
  -c) exit 0 ;;
  *) printf '%s\\n' "$*" >> launched ;;
esac""",
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, "--nproc_per_node 2 "),
        # GPUS is ours to set
        ({"NPROC": "3", "GPUS": "0"}, "--nproc_per_node 3 "),
        ({"SLURM_GPUS_ON_NODE": "0"}, "--nproc_per_node 2 "),
        # the launcher counts what Slurm shows it
        (
            {"SLURM_GPUS_ON_NODE": "8", "NPROC": "3"},
            "",
        ),
    ],
)
def test_slurm_starts_a_launcher_on_each_node(
    commands, tmp_path, variables, ranks
):
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").touch()
    # as Slurm does
    copy = shutil.copy(LAUNCH / "slurm.sbatch", tmp_path / "slurm_script")

    commands.start(
        "job",
        ["bash", copy, "train.py", "--name", "a b"],
        PATH=f"{tmp_path}:/usr/bin:/bin",
        PYTHON="python",
        SLURM_SUBMIT_DIR=str(LAUNCH.parent),
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_JOB_ID="1234567",
        **variables,
    )

    assert commands.wait() == {"job": 0}
    srun = (tmp_path / "srun.args").read_text()
    assert srun.startswith(
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c "
    )
    assert (tmp_path / "launched").read_text().splitlines() == [
        f"-u -m paddle.distributed.launch --master 127.0.0.1:24567 --nnodes 2 --rank {node} --host 127.0.0.1 "
        f"{ranks}--log_dir log/slurm-1234567/host-{node} train.py --name a b"
        for node in range(2)
    ]


@pytest.mark.multiprocess
def test_slurm_with_etcd_starts_an_elastic_job(commands, tmp_path):
    (tmp_path / "launch").mkdir()
    elastic = tmp_path / "launch" / "elastic.sh"
    elastic.write_text(
        '#!/bin/sh\necho "$ETCD $JOB $NNODES $NPROC $LOG_DIR $*" >> launched\n'
    )
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
    for path in (elastic, *(tmp_path / name for name in STUBS)):
        path.chmod(0o755)
    copy = shutil.copy(LAUNCH / "slurm.sbatch", tmp_path / "slurm_script")

    commands.start(
        "job",
        ["bash", copy, "train.py", "--name", "a b"],
        PATH=f"{tmp_path}:/usr/bin:/bin",
        ETCD="10.0.0.1:2379",
        SLURM_SUBMIT_DIR=str(tmp_path),
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_JOB_ID="7",
    )

    assert commands.wait() == {"job": 0}
    srun = (tmp_path / "srun.args").read_text()
    assert (
        "--nodes=2 --ntasks=2 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 --wait=0 bash -c "
        in srun
    )
    assert (tmp_path / "launched").read_text().splitlines() == [
        f"10.0.0.1:2379 slurm-7 1:2 2 log/slurm-7/host-{node} train.py --name a b"
        for node in range(2)
    ]


def test_slurm_options_stand_before_the_first_command():
    text = (LAUNCH / "slurm.sbatch").read_text()
    before, after = text.split("set -euo pipefail")

    assert re.findall(r"^#SBATCH --([\w-]+)", before, re.MULTILINE) == [
        "job-name",
        "nodes",
        "ntasks-per-node",
        "cpus-per-task",
        "output",
    ]
    assert "#SBATCH" not in after


@pytest.mark.parametrize("name", ["hosts.sh", "slurm.sbatch"])
def test_scripts_are_valid_bash_and_stop_at_the_first_error(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)

    assert "\nset -euo pipefail\n" in (LAUNCH / name).read_text()
