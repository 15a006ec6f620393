"""A Kubernetes control plane on loopback: etcd, kube-apiserver, kube-controller-manager 1.20.2; who plays the rest.

No node and no kubelet: `Kubelet` lets pods become Ready after a cold start. `MetricsApi` is the adapter that the HPA
controller asks, behind an APIService as in a cluster.
"""

import json
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from real.preflight import free_port

TOKEN = "oracle"
NAMESPACE = "inference"


class ControlPlane:
    """The three programs, as long as this is open."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self.folder = binaries, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        self._context = ssl.create_default_context()
        self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def __enter__(self) -> "ControlPlane":
        self._keys()
        etcd, peer = free_port(), free_port()
        self._start(
            "etcd", "--name", "oracle", "--data-dir", self.folder / "etcd",
            "--listen-client-urls", f"http://127.0.0.1:{etcd}", "--advertise-client-urls", f"http://127.0.0.1:{etcd}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        )  # fmt: skip
        self._start(
            "kube-apiserver", "--etcd-servers", f"http://127.0.0.1:{etcd}", "--bind-address", "127.0.0.1",
            "--secure-port", self.port, "--cert-dir", self.folder / "apiserver",
            "--token-auth-file", self.folder / "tokens",
            "--authorization-mode", "AlwaysAllow", "--service-cluster-ip-range", "10.96.0.0/16",
            "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", self.folder / "key.pem",
            "--service-account-signing-key-file", self.folder / "key.pem",
            "--disable-admission-plugins", "ServiceAccount", "--enable-aggregator-routing=false",
            "--proxy-client-cert-file", self.folder / "cert.pem", "--proxy-client-key-file", self.folder / "key.pem",
            "--requestheader-client-ca-file", self.folder / "cert.pem", "--requestheader-allowed-names", "",
            "--requestheader-username-headers", "X-Remote-User",
        )  # fmt: skip
        self._wait(lambda: self.call("GET", "/readyz", raw=True) == "ok", 120, "kube-apiserver")
        self._start(
            "kube-controller-manager", "--kubeconfig", self.folder / "kubeconfig", "--leader-elect=false", "--port=0",
            "--secure-port", free_port(), "--cert-dir", self.folder / "manager",
            "--controllers", "deployment,replicaset,horizontalpodautoscaling,garbagecollector",
            "--horizontal-pod-autoscaler-sync-period", "1s",
        )  # fmt: skip
        return self

    def __exit__(self, *ignored: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _keys(self) -> None:
        subject = ["-subj", "/CN=localhost", "-days", "2", "-nodes", "-newkey", "rsa:2048"]
        run = ["openssl", "req", "-x509", *subject, "-keyout", "key.pem", "-out", "cert.pem"]
        subprocess.run(run, cwd=self.folder, check=True, capture_output=True)
        (self.folder / "tokens").write_text(f"{TOKEN},admin,admin,system:masters\n")
        server = f"https://127.0.0.1:{self.port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "oracle",
            "clusters": [
                {"name": "oracle", "cluster": {"server": server, "insecure-skip-tls-verify": True}}
            ],
            "users": [{"name": "oracle", "user": {"token": TOKEN}}],
            "contexts": [{"name": "oracle", "context": {"cluster": "oracle", "user": "oracle"}}],
        }
        (self.folder / "kubeconfig").write_text(json.dumps(config))

    def _start(self, program: str, *options: object) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            command = [str(self._binaries / program), *map(str, options)]
            self._processes.append(
                subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
            )

    def _wait(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                if holds():
                    return
            except (OSError, urllib.error.URLError):
                pass
            if time.monotonic() > until or any(p.poll() is not None for p in self._processes):
                log = (self.folder / f"{what}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{what} does not answer:\n{log}")
            time.sleep(0.2)

    def call(
        self, method: str, path: str, body: Any = None, raw: bool = False, kind: str = "json"
    ) -> Any:
        """The answer of the API server. Raises urllib.error.HTTPError."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {TOKEN}", "Content-Type": f"application/{kind}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=10, context=self._context) as answer:
            text = answer.read().decode()
        return text if raw else json.loads(text)

    def version(self) -> str:
        """What the API server calls itself."""
        command = [str(self._binaries / "kube-apiserver"), "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def kubectl(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """kubectl at this server."""
        from real.manifest_lint.tools import kubectl

        command = [str(kubectl()), "--kubeconfig", str(self.folder / "kubeconfig"), *words]
        return subprocess.run(command, input=stdin, capture_output=True, text=True)


class MetricsApi:
    """external.metrics.k8s.io with one metric, whose value is that of a function of the seconds since `begin`."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self._value: Callable[[float], float] = lambda seconds: 0.0
        self._began = time.monotonic()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                group = "/apis/external.metrics.k8s.io/v1beta1"
                path = self.path.partition("?")[0].rstrip("/")
                if path == group:
                    resource = {
                        "name": name, "singularName": "", "namespaced": True, "kind": "ExternalMetricValueList",
                        "verbs": ["get"],
                    }  # fmt: skip
                    body: dict[str, Any] = {
                        "kind": "APIResourceList",
                        "apiVersion": "v1",
                        "groupVersion": "external.metrics.k8s.io/v1beta1",
                        "resources": [resource],
                    }
                elif path.startswith(f"{group}/namespaces/"):
                    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                    value = api._value(time.monotonic() - api._began)
                    item = {
                        "metricName": name,
                        "metricLabels": {},
                        "timestamp": stamp,
                        "value": f"{round(value * 1000)}m",
                    }
                    body = {
                        "kind": "ExternalMetricValueList",
                        "apiVersion": "external.metrics.k8s.io/v1beta1",
                        "metadata": {},
                        "items": [item],
                    }
                else:
                    body = {"paths": [group]}
                text = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *ignored: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(plane.folder / "cert.pem", plane.folder / "key.pem")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        port = self._server.server_address[1]
        plane.call(
            "POST",
            "/api/v1/namespaces/default/services",
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "metrics"},
                "spec": {
                    "type": "ExternalName",
                    "externalName": "localhost",
                    "ports": [{"port": port}],
                },
            },
        )
        plane.call(
            "POST",
            "/apis/apiregistration.k8s.io/v1/apiservices",
            {
                "apiVersion": "apiregistration.k8s.io/v1",
                "kind": "APIService",
                "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
                "spec": {
                    "group": "external.metrics.k8s.io",
                    "version": "v1beta1",
                    "service": {"name": "metrics", "namespace": "default", "port": port},
                    "insecureSkipTLSVerify": True,
                    "groupPriorityMinimum": 100,
                    "versionPriority": 100,
                },
            },
        )

    def begin(self, value: Callable[[float], float]) -> None:
        """The value from now on, by the seconds from now."""
        self._value, self._began = value, time.monotonic()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()


class Kubelet:
    """Lets each pod of a namespace be Ready so many seconds after its creation."""

    def __init__(self, plane: ControlPlane, cold_start_s: float) -> None:
        self._plane, self.cold_start_s = plane, cold_start_s
        self._seen: dict[str, float] = {}
        self._ready: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.2):
            try:
                pods = self._plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
                for pod in pods:
                    self._advance(pod["metadata"]["name"])
            except (urllib.error.URLError, OSError):
                continue

    def _advance(self, name: str) -> None:
        now = time.monotonic()
        born = self._seen.setdefault(name, now)
        if name in self._ready or now < born + self.cold_start_s:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {"type": "Ready", "status": "True", "lastTransitionTime": stamp}
        status = {"phase": "Running", "startTime": stamp, "conditions": [condition]}
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/status"
        self._plane.call("PATCH", path, {"status": status}, kind="merge-patch+json")
        self._ready.add(name)

    def close(self) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()


def is_there(folder: Path) -> bool:
    """Whether the programs are in a folder, and openssl is installed."""
    names = ("etcd", "kube-apiserver", "kube-controller-manager")
    return all((folder / name).exists() for name in names) and shutil.which("openssl") is not None
