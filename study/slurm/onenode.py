"""A Slurm of one node on this machine, for trying and for the tests: Debian or Ubuntu, as root, no systemd needed.

``python -m study.slurm.onenode up|down [--state DIR] [--no-accounting] [--max-array-size N]``. Everything lives in one
folder, every daemon listens on loopback, and ``down`` stops what ``up`` started, by process id, and nothing else.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from study.arguments import Parser
from study.errors import UserError
from study.slurm import daemons

STATE = Path("/var/tmp/study-slurm")  # short, since a socket's path has 108 characters, and open to munge and mysql
PACKAGES = {"slurmctld": "slurm-wlm", "munged": "munge"}
ACCOUNTING_PACKAGES = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
MAX_ARRAY_SIZE = 1001  # Slurm's own default
DAEMONS = ("slurmd", "slurmctld", "slurmdbd", "mariadbd", "munged")  # in the order in which they stop

MADE_BY = "# Made by `make slurm`; `make slurm-down` removes this folder."

SLURM_CONF = """\
{made_by}
ClusterName=study
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={slurmctld}
SlurmdPort={slurmd}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
AuthType=auth/munge
# A requeued job waits for its old credential to expire before it starts again (120 s if not set).
AuthInfo=socket={state}/munge/socket,cred_expire=5
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool
SlurmctldPidFile={state}/slurmctld.self
SlurmdPidFile={state}/slurmd.self
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
MinJobAge=300
MaxArraySize={max_array_size}
{accounting}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=normal Nodes={host} Default=YES MaxTime=UNLIMITED PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes={host} MaxTime=UNLIMITED PriorityTier=10 PreemptMode=OFF
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={state}/munge/socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={slurmdbd}
CommunicationParameters=NoInAddrAny
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mariadbd}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
LogFile={state}/slurmdbd.log
PidFile={state}/slurmdbd.self
"""

MARIADB_CONF = """\
[mariadbd]
user=mysql
datadir={state}/mariadb/data
socket={state}/mariadb/socket
pid-file={state}/mariadb/self
log-error={state}/mariadb/log
bind-address=127.0.0.1
port={mariadbd}
innodb_buffer_pool_size=64M
innodb_log_file_size=16M
innodb_lock_wait_timeout=900
"""


class CannotInstallError(UserError):
    """This machine cannot have a Slurm: not root, no apt, or no package mirror."""


def up(
    state: Path = STATE, *, accounting: bool = True, max_array_size: int = MAX_ARRAY_SIZE, cpus: int | None = None
) -> Path:
    """Start the cluster, or what is missing of it, and wait until its node takes jobs.

    Args:
        state: the folder that holds all of it; made if it does not exist.
        accounting: with slurmdbd and MariaDB, so that ``sacct`` answers.
        max_array_size: Slurm's MaxArraySize: one more than the largest index of an array.
        cpus: cores that Slurm believes in; those of the machine by default, more to try many small jobs at once.

    Returns:
        The path of slurm.conf, to be set as ``SLURM_CONF`` where /etc/slurm/slurm.conf does not point at it.

    Raises:
        CannotInstallError: not root, or the packages cannot be installed.
        UserError: a daemon did not start; its log is named.
    """
    if os.geteuid() != 0:
        raise CannotInstallError(
            "make slurm: user = not root: allowed is root, since Slurm's daemons run jobs as their users"
        )
    _install(PACKAGES | (ACCOUNTING_PACKAGES if accounting else {}))
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o755)
    conf = state / "slurm.conf"
    if not conf.exists() or not any(daemons.running(state, name) for name in DAEMONS):
        _write_settings(state, accounting, max_array_size, cpus or os.cpu_count() or 1)
    env = os.environ | {"SLURM_CONF": str(conf)}
    _munge(state)
    if (state / "slurmdbd.conf").exists():
        _mariadb(state)
        daemons.start(state, "slurmdbd", ["slurmdbd", "-D"], env)
        daemons.until(state, "slurmdbd", lambda: _succeeds(["sacctmgr", "-n", "list", "cluster"], env))
    daemons.start(state, "slurmctld", ["slurmctld", "-D", "-f", str(conf)], env)
    daemons.until(state, "slurmctld", lambda: _succeeds(["scontrol", "ping"], env))
    daemons.start(state, "slurmd", ["slurmd", "-D", "-f", str(conf)], env)
    daemons.until(state, "slurmd", lambda: _node_state(env) in {"idle", "mixed", "allocated"})
    if state == STATE and not SYSTEM_CONF.exists():
        SYSTEM_CONF.parent.mkdir(exist_ok=True)
        SYSTEM_CONF.unlink(missing_ok=True)  # a dangling link
        SYSTEM_CONF.symlink_to(conf)
    return conf


def down(state: Path = STATE) -> None:
    """Cancel the jobs, stop the daemons that :func:`up` started, and remove their folder; none there, nothing done."""
    conf = state / "slurm.conf"
    if not conf.exists() or not conf.read_text().startswith(MADE_BY):
        return
    env = os.environ | {"SLURM_CONF": str(conf)}
    if daemons.running(state, "slurmctld") and daemons.running(state, "slurmd"):
        jobs = ["squeue", "--noheader", "--format=%A"]
        listed = subprocess.run(jobs, env=env, capture_output=True, text=True, check=False).stdout.split()
        if listed:
            subprocess.run(["scancel", *listed], env=env, check=False)
            daemons.until(state, "slurmctld", lambda: not subprocess.check_output(jobs, env=env))
    for name in DAEMONS:
        daemons.stop(state, name)
    if SYSTEM_CONF.is_symlink() and SYSTEM_CONF.readlink() == conf:
        SYSTEM_CONF.unlink()
    shutil.rmtree(state)


def _install(needed: dict[str, str]) -> None:
    missing = [package for program, package in needed.items() if not shutil.which(program, path=daemons.PATH)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise CannotInstallError(
            f"make slurm: {' '.join(missing)} not installed: allowed is Debian or Ubuntu, or install them"
        )
    env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    # A container's policy forbids starting services, and so do we: ours run from their own folder.
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
        if not _succeeds(["apt-get", "update", "-q"], env) or subprocess.run(install, env=env, check=False).returncode:
            raise CannotInstallError(
                f"make slurm: apt-get install {' '.join(missing)}: failed; its answer stands above"
            )
    finally:
        if ours:
            policy.unlink()


def _write_settings(state: Path, accounting: bool, max_array_size: int, cpus: int) -> None:
    ports = dict(zip(("slurmctld", "slurmd", "slurmdbd", "mariadbd"), _free_ports(4), strict=True))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    values = ports | {
        "made_by": MADE_BY,
        "state": state,
        "host": socket.gethostname().split(".")[0],
        "cpus": cpus,
        "memory": memory * 9 // 10,
        "max_array_size": max_array_size,
        "password": secrets.token_hex(16),
        "accounting": "AccountingStorageType=accounting_storage/none",
    }
    private = {"slurmdbd.conf": SLURMDBD_CONF, "mariadb.conf": MARIADB_CONF}
    if accounting:
        values["accounting"] = (
            "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
            f"AccountingStoragePort={ports['slurmdbd']}\n"
            f"AccountingStoragePass={state}/munge/socket\n"
            "JobAcctGatherType=jobacct_gather/linux"
        )
        for name, text in private.items():
            (state / name).touch(mode=0o600)
            (state / name).write_text(text.format(**values))
    else:
        for name in private:
            (state / name).unlink(missing_ok=True)
    for folder in ("ctld", "spool"):
        (state / folder).mkdir(exist_ok=True)
    (state / "slurm.conf").write_text(SLURM_CONF.format(**values))


def _munge(state: Path) -> None:
    folder = state / "munge"
    if not folder.exists():
        folder.mkdir()
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_bytes(secrets.token_bytes(128))
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
    command = ["munged", "--foreground", f"--socket={folder}/socket", f"--key-file={folder}/key"]
    command += [f"--pid-file={folder}/self", f"--seed-file={folder}/seed", f"--log-file={folder}/log"]
    daemons.start(state, "munged", command, dict(os.environ), user="munge")
    socket_path = folder / "socket"
    daemons.until(state, "munged", lambda: _succeeds(["munge", "-n", f"--socket={socket_path}"], dict(os.environ)))


def _mariadb(state: Path) -> None:
    folder, env = state / "mariadb", dict(os.environ)
    defaults = f"--defaults-file={state}/mariadb.conf"
    if not folder.exists():
        folder.mkdir()
        shutil.chown(folder, "mysql", "mysql")
        install = ["mariadb-install-db", defaults, "--user=mysql", f"--datadir={folder}/data", "--skip-test-db"]
        if not _succeeds([*install, "--auth-root-authentication-method=socket"], env):
            raise UserError(f"make slurm: mariadb-install-db failed: see {folder}/log")
    daemons.start(state, "mariadbd", ["mariadbd", defaults], env)
    client = ["mariadb", "--no-defaults", "--user=root", f"--socket={folder}/socket"]
    daemons.until(state, "mariadbd", lambda: _succeeds([*client, "-e", "select 1"], env))
    password = next(
        line.partition("=")[2] for line in (state / "slurmdbd.conf").read_text().splitlines() if "StoragePass" in line
    )
    grant = (
        f"create user if not exists slurm@127.0.0.1 identified by '{password}';"
        "grant all on slurm_acct_db.* to slurm@127.0.0.1;"
    )
    subprocess.run(client, input=grant, text=True, check=True)


def _succeeds(command: list[str], env: dict[str, str]) -> bool:
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def _node_state(env: dict[str, str]) -> str:
    command = ["sinfo", "--noheader", "--format=%T", "--partition=normal"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False).stdout.strip()


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def main() -> int:
    parser = Parser(prog="python -m study.slurm.onenode", description=__doc__)
    parser.add_argument("action", choices=["up", "down"])
    parser.add_argument("--state", type=Path, default=STATE, help="folder of the cluster (default %(default)s)")
    parser.add_argument("--no-accounting", action="store_true", help="leave slurmdbd and MariaDB out")
    parser.add_argument(
        "--max-array-size", type=int, metavar="N", help=f"largest array index + 1 (default {MAX_ARRAY_SIZE})"
    )
    parser.add_argument("--cpus", type=int, metavar="N", help="cores that Slurm believes in (default: the machine's)")
    args = parser.parse_args()
    state = args.state.resolve()
    try:
        if args.action == "down":
            down(state)
            return 0
        if any(daemons.running(state, name) for name in DAEMONS) and (
            args.no_accounting or args.max_array_size or args.cpus
        ):
            raise UserError(
                f"make slurm: {state}: runs already, with its own settings; allowed is make slurm-down first"
            )
        conf = up(
            state,
            accounting=not args.no_accounting,
            max_array_size=args.max_array_size or MAX_ARRAY_SIZE,
            cpus=args.cpus,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"Slurm runs. Partitions: normal (default) and urgent, which preempts it.\nexport SLURM_CONF={conf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
