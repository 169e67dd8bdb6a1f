# attend-server and the attend command line on Debian 12, about 155 MB, with CUDA about 730 MB:
#
#   docker build -t attend .
#   docker run -p 50051:50051 -p 9464:9464 -v /models/bert:/models/bert:ro attend --model=bert=/models/bert
#
# Every flag can also be given as ATTEND_<FLAG>. Nothing is written to disk: a read-only root works.
#
# Build arguments: DEVICE is cpu or cuda. The bases may be any images of Debian 12, e.g. pinned by digest; for cuda
# the first needs the CUDA Toolkit 13 in /usr/local/cuda, the second nothing: what the engine needs of the toolkit is
# copied, 542 MB of libcublasLt and 1 MB of libcudart. The driver's part comes from the machine that runs it:
#
#   docker build -t attend:cuda --build-arg DEVICE=cuda --build-arg BUILD_BASE=... .
#   docker run --gpus=1 -p 50051:50051 -p 9464:9464 attend:cuda
ARG BUILD_BASE=debian:bookworm-slim
ARG RUNTIME_BASE=debian:bookworm-slim

FROM ${BUILD_BASE} AS build
WORKDIR /src
COPY deploy/install-dependencies.sh deploy/
RUN deploy/install-dependencies.sh
COPY . .
ARG DEVICE=cpu
# As in a checkout, the build lies in the sources: with paths relative to them, ccache knows again what was
# compiled elsewhere. /out is what the image gets below /usr/local; the plugin looks for libraries beside itself.
RUN --mount=type=cache,id=ccache,target=/root/.cache/ccache \
    set -- attend_server attend_cli \
 && export CCACHE_BASEDIR=/src PATH="$PATH:/usr/local/cuda/bin" \
 && case "$DEVICE" in \
      cpu) cuda=OFF ;; \
      cuda) cuda=ON; set -- "$@" attend_engine_cuda; \
        command -v nvcc || { echo "DEVICE=cuda: BUILD_BASE has no nvcc (looked in PATH and" \
          "/usr/local/cuda/bin); take an image with the CUDA Toolkit 13" >&2; exit 2; } ;; \
      *) echo "DEVICE is '$DEVICE' (allowed: cpu, cuda)" >&2; exit 2 ;; \
    esac \
 && cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTEND_TESTS=OFF -DATTEND_CUDA="$cuda" \
 && ninja -C build "$@" \
 && mkdir -p /out/bin \
 && cp build/bin/attend-server build/bin/attend /out/bin \
 && strip /out/bin/* \
 && if [ "$cuda" = ON ]; then \
      mkdir -p /out/lib/attend \
      && cp build/bin/attend-engine-cuda.so /out/lib/attend \
      && strip /out/lib/attend/* \
      && ldd build/bin/attend-engine-cuda.so >build/needed \
      && sed -n 's/.*\(libcudart\|libcublasLt\).* => \(.*\) (.*/\2/p' build/needed >build/libraries \
      && xargs cp -L -t /out/lib/attend <build/libraries; \
    fi

FROM ${RUNTIME_BASE}
ARG RUNTIME_BASE
LABEL org.opencontainers.image.title="attend" \
      org.opencontainers.image.description="Attention inference over gRPC: batching, sessions, Prometheus metrics" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${RUNTIME_BASE}"
COPY deploy/install-dependencies.sh /tmp/
RUN /tmp/install-dependencies.sh --runtime \
 && apt-get clean \
 && rm -rf /tmp/install-dependencies.sh /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --no-log-init --shell /usr/sbin/nologin attend
COPY --from=build /out/ /usr/local/
USER 10001:10001
# A container's loopback reaches nobody: both listeners take every address. There is no TLS, so the network
# around the container must be trusted or a proxy must end TLS in front of it.
ENV ATTEND_LISTEN=0.0.0.0:50051 ATTEND_METRICS_LISTEN=0.0.0.0:9464 ATTEND_ALLOW_INSECURE=true
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["attend-server", "--health"]
ENTRYPOINT ["attend-server"]
