"""A real cluster for tests: one process per service, on free ports, ended by process id."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import msgspec
import psutil

from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.security.tls import ClientTls
from pdserve.common.security.watch_proof import WatchChallenge
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.worker.worker_servicer import TOO_LATE
from tests.support.processes.forked_process import ForkedProcess
from tests.support.processes.reserved_port import reserved_port
from tests.support.run.waiting import HANG_S, wait_until

KEY = "a key for tests, of no worth at all"
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ("-m", "pdserve.cli.main")
_METRICS = re.compile(r"metrics (http://\S+)/metrics")
_ROUTER_READY = re.compile(r"ready: OpenAI https?://(\S+)/v1  gRPC (\S+)")


@dataclass
class Service:
    """One process."""

    name: str
    role: str
    flags: tuple[str, ...]
    process: ForkedProcess
    log: Path
    address: str = ""
    """gRPC services of a worker, or of a router's front end."""
    http: str = ""
    reports: int = -1
    """A worker's: the pipe on which it says that it is ready, until it has been waited for."""

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Cluster:
    """Processes that share one key and one folder for logs."""

    folder: Path
    services: dict[str, Service] = field(default_factory=dict)
    worker_program: Sequence[str] = PROGRAM
    """The program in place of the `pdserve` command where a worker is started."""
    tls: ClientTls | None = None
    """The test's own TLS identity for calls to workers."""
    _ports: ExitStack = field(default_factory=ExitStack)
    """Reservations of the ports of workers, which may end and come back."""

    @property
    def router(self) -> Service:
        return self.services["router"]

    def start_worker(self, role: str, *flags: str, name: str = "", port: int = 0) -> Service:
        """Start a prefill or decode worker and wait until it is ready."""
        service = self.launch_worker(role, *flags, name=name, port=port)
        self.wait_for_worker(service)
        return service

    def launch_worker(self, role: str, *flags: str, name: str = "", port: int = 0) -> Service:
        """Start it without waiting."""
        name = name or role
        port = port or self._ports.enter_context(reserved_port())
        read, write = os.pipe()
        command = [role, "--port", str(port), "--worker-id", name, *flags, "--report-fd", str(write)]
        service = self._launch(name, role, [*self.worker_program, *command], flags, pass_fds=(write,))
        os.close(write)
        service.reports = read
        return service

    def wait_for_worker(self, service: Service) -> None:
        with os.fdopen(service.reports, "rb") as reports:
            for line in reports:
                report = msgspec.json.decode(line)
                if report["type"] == "ready":
                    service.address = report["address"]
                    return
        raise AssertionError(f"{service.name} ended before it was ready:\n{service.read_log()}")

    def start_router(
        self, *flags: str, prefill: Sequence[str] = (), decode: Sequence[str] = (), name: str = "router"
    ) -> Service:
        command = ["router", "--port", "0", "--grpc-port", "0", *flags]
        for option, addresses in (("--prefill", prefill), ("--decode", decode)):
            for address in addresses:
                command += [option, address]
        service = self._launch(name, "router", [*PROGRAM, *command], flags)

        def said() -> re.Match[str] | None:
            assert service.process.poll() is None, f"the router ended:\n{service.read_log()}"
            return _ROUTER_READY.search(service.read_log())

        service.http, service.address = wait_until(said, lambda: f"the router is ready\n{service.read_log()}").groups()
        return service

    def restart(self, name: str) -> Service:
        """Restart an ended worker at its old address."""
        old = self.services[name]
        return self.start_worker(old.role, *old.flags, name=name, port=int(old.address.rpartition(":")[2]))

    def _launch(
        self, name: str, role: str, command: list[str], flags: tuple[str, ...], pass_fds: tuple[int, ...] = ()
    ) -> Service:
        log = self.folder / f"{name}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        environ |= {"PDSERVE_DEPLOYMENT_KEY": KEY, "OMP_NUM_THREADS": "1"}
        if command[0] != PROGRAM[0]:  # a program of the tests imports from them
            environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with log.open("ab") as output:
            process = ForkedProcess(command, output=output.fileno(), environ=environ, pass_fds=pass_fds)
        service = self.services[name] = Service(name, role, flags, process, log)
        return service

    def metrics_url(self, service: Service) -> str:
        """Address at which a service serves `/metrics`, from its log."""
        found: list[str] = _METRICS.findall(service.read_log())
        return found[-1]

    def metric(self, service: Service, name: str, labels: str = "") -> float:
        """A value of `/metrics`. labels: all of them, as they are written there."""
        with urllib.request.urlopen(f"{self.metrics_url(service)}/metrics", timeout=HANG_S) as response:
            sample = re.escape(f"{name}{{{labels}}}" if labels else name)
            found = re.search(rf"^{sample} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None, f"no {name}"
        return float(found[1])

    def load(self, service: Service) -> worker_pb2.Load:
        """A worker's state now. A worker gives up a handshake after 5 s, which a busy machine may need: then another one begins."""
        return wait_until(lambda: self._load(service), f"{service.name} reports its load")

    def _load(self, service: Service) -> worker_pb2.Load | None:
        """None after a handshake that took too long."""
        with self._channel(service) as channel:
            challenge = WatchChallenge(DeploymentKey(KEY.encode()), blocks=False)
            requests: queue.SimpleQueue[worker_pb2.WatchRequest | None] = queue.SimpleQueue()
            requests.put(challenge.opening)
            watch = worker_pb2_grpc.WorkerServiceStub(channel).Watch(
                iter(requests.get, None), timeout=HANG_S, wait_for_ready=True
            )
            try:
                challenge.read(next(watch))
                requests.put(challenge.answer)
                return next(event.load for event in watch if event.HasField("load"))
            except grpc.RpcError:
                if not (watch.details() or "").startswith(TOO_LATE):
                    raise
                return None
            finally:
                watch.cancel()
                requests.put(None)

    def _channel(self, service: Service) -> grpc.Channel:
        if self.tls is None:
            return grpc.insecure_channel(service.address)
        credentials = grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.certificate)
        return grpc.secure_channel(service.address, credentials)

    def check_pools(self) -> None:
        """The pool check from outside: every worker comes to rest with nothing in use, nothing lost (I2)."""
        for service in self.services.values():
            if service.role == "router" or service.process.poll() is not None:
                continue

            def at_rest(service: Service = service) -> bool:
                load = self.load(service)
                assert load.blocks_free + load.blocks_cached + load.blocks_in_use == load.blocks_total
                under_way = load.num_running or load.num_waiting or load.num_remote_kv or load.open_transfers
                return not (load.blocks_in_use or under_way)

            wait_until(at_rest, lambda service=service: f"{service.name} comes to rest: {self.load(service)}")  # type: ignore[misc]

    def check_logs(self) -> None:
        """A traceback in any log is a failure."""
        for service in self.services.values():
            assert "Traceback" not in service.read_log(), f"{service.name}:\n{service.read_log()}"

    def stop(self) -> None:
        """End every process; none may leave a port open."""
        self._ports.close()
        alive = [service for service in self.services.values() if service.process.poll() is None]
        for service in alive:
            service.signal(signal.SIGCONT)
            service.signal(signal.SIGTERM)
        for service in alive:
            try:
                service.process.wait(HANG_S)
            except subprocess.TimeoutExpired as error:
                service.process.kill()
                service.process.wait(HANG_S)
                # what failed in the test before is shown with it
                raise AssertionError(f"{service.name} did not end:\n{service.read_log()}") from error
        mine = {service.process.pid for service in self.services.values()}
        assert not [pid for pid in mine if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


@contextmanager
def running_cluster(folder: Path, worker_program: Sequence[str] = PROGRAM) -> Iterator[Cluster]:
    """A cluster that ends with the block, whatever happens in it."""
    cluster = Cluster(folder, worker_program=worker_program)
    try:
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def pd_cluster(
    folder: Path,
    model: Path,
    *,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    both: Sequence[str] = (),
    router: Sequence[str] = (),
    worker_program: Sequence[str] = PROGRAM,
) -> Iterator[Cluster]:
    """Router, one prefill and one decode worker; the flags of each."""
    with running_cluster(folder, worker_program) as cluster:
        common = ("--model", str(model), *both)
        source = cluster.launch_worker("prefill", *common, *prefill)
        sink = cluster.launch_worker("decode", *common, *decode)
        for worker in (source, sink):
            cluster.wait_for_worker(worker)
        cluster.start_router("--model", str(model), *router, prefill=[source.address], decode=[sink.address])
        yield cluster
