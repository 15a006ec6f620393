#!/usr/bin/env bash
# Builds kube-apiserver and kube-controller-manager 1.20.2 from Debian 12's source package `kubernetes`, and unpacks
# etcd beside them. Nothing is installed: package lists, sources and Go stay under the folder.
#
#   scripts/build_control_plane.sh FOLDER     about 5 minutes on 2 cores; what is there already is not made again
#
# The binaries are FOLDER/bin/{kube-apiserver,kube-controller-manager,etcd}. JOBS=1 builds one package at a time.
set -euo pipefail

folder=$(mkdir -p "${1:?folder}" && cd "$1" && pwd)
jobs=${JOBS:-$(nproc)}
cd "$folder"
{ command -v apt-get && command -v dpkg-deb; } > /dev/null \
  || { echo "Debian's apt-get and dpkg-deb are needed for the sources and Go" >&2; exit 1; }

if test ! -d go/src/k8s.io/kubernetes; then
  mkdir -p apt/lists/partial apt/cache/archives/partial apt/sources.d
  # The system's own sources of Debian 12, with source packages; its lists are left alone.
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    test -f "$file" && grep -q bookworm "$file" && grep -q debian "$file" || continue
    case $file in
      *.sources) sed 's/^Types: deb$/Types: deb deb-src/' "$file" > "apt/sources.d/${file##*/}" ;;
      *.list) { cat "$file"; sed -n 's/^deb /deb-src /p' "$file"; } > "apt/sources.d/${file##*/}" ;;
    esac
  done
  test -n "$(ls apt/sources.d)" \
    || { echo "no sources of Debian 12 (bookworm) in /etc/apt, whose package kubernetes is needed" >&2; exit 1; }
  apt=(-o "Dir::State::lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o Dir::Etc::sourcelist=/dev/null
    -o "Dir::Etc::sourceparts=$folder/apt/sources.d" -o APT::Sandbox::User=root)
  echo "fetching the sources of Kubernetes 1.20.2, Go 1.19 and etcd"
  apt-get "${apt[@]}" update > apt.log 2>&1
  apt-get "${apt[@]}" source --download-only kubernetes >> apt.log 2>&1
  apt-get "${apt[@]}" download golang-1.19-go golang-1.19-src etcd-server >> apt.log 2>&1
  for package in golang-1.19-*.deb etcd-server_*.deb; do dpkg-deb -x "$package" root; done
  mkdir -p unpacked go/src/k8s.io
  tar xzf kubernetes_*.orig.tar.gz -C unpacked
  mv unpacked/kubernetes-* go/src/k8s.io/kubernetes
fi

export GOPATH=$folder/go GOROOT=$folder/root/usr/lib/go-1.19 GO111MODULE=off CGO_ENABLED=0
export GOCACHE=$folder/cache GOFLAGS="-p=$jobs" PATH=$folder/root/usr/lib/go-1.19/bin:$PATH
mkdir -p bin
cp -n root/usr/bin/etcd bin/etcd || true
cd go/src/k8s.io/kubernetes

# The one generated file that the tarball lacks.
if test ! -f pkg/generated/openapi/zz_generated.openapi.go; then
  echo "generating the OpenAPI definitions"
  go build -o "$folder/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  tagged=$(grep -rl --include='*.go' '+k8s:openapi-gen=' cmd pkg vendor/k8s.io/*/ \
    | grep -v -e /generated/ -e code-generator -e sample-apiserver -e gengo -e kube-openapi \
    | xargs -n1 dirname | LC_ALL=C sort -u | sed 's,^,k8s.io/kubernetes/,' | paste -sd,)
  "$folder/bin/openapi-gen" -i "$tagged" -p k8s.io/kubernetes/pkg/generated/openapi \
    -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt \
    -r "$folder/openapi-violations.txt" --output-base "$folder/go/src"
fi

version=k8s.io/component-base/version
flags="-s -w"
for path in "$version" "k8s.io/client-go/pkg/version" "k8s.io/kubernetes/vendor/$version"; do
  flags+=" -X $path.gitVersion=v1.20.2 -X $path.gitMajor=1 -X $path.gitMinor=20 -X $path.gitTreeState=archive"
done
for program in kube-controller-manager kube-apiserver; do
  test -x "$folder/bin/$program" || {
    echo "building $program"
    go build -ldflags "$flags" -o "$folder/bin/$program" "./cmd/$program"
  }
done
echo "built: $folder/bin"
