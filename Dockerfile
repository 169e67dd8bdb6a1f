# attend-server and the attend command line on Debian 12.
#
#   docker build -t attend .
#   docker run -p 50051:50051 -p 9464:9464 -v /models/bert:/models/bert:ro attend --model=bert=/models/bert
#
# Every flag can also be given as ATTEND_<FLAG>. Nothing is written to disk: a read-only root works.
FROM debian:bookworm-slim AS build
WORKDIR /src
COPY deploy/install-dependencies.sh deploy/
RUN deploy/install-dependencies.sh
COPY . .
RUN cmake -S . -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTEND_TESTS=OFF \
 && ninja -C /build attend_server attend_cli \
 && strip /build/bin/attend-server /build/bin/attend

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="attend" \
      org.opencontainers.image.description="Attention inference over gRPC: batching, sessions, Prometheus metrics" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="debian:bookworm-slim"
COPY deploy/install-dependencies.sh /tmp/
RUN /tmp/install-dependencies.sh --runtime \
 && rm -rf /tmp/install-dependencies.sh /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin attend
COPY --from=build /build/bin/attend-server /build/bin/attend /usr/local/bin/
USER 10001:10001
# A container's loopback reaches nobody: both listeners take every address. There is no TLS, so the network
# around the container must be trusted or a proxy must end TLS in front of it.
ENV ATTEND_LISTEN=0.0.0.0:50051 ATTEND_METRICS_LISTEN=0.0.0.0:9464 ATTEND_ALLOW_INSECURE=true
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["attend-server", "--health"]
ENTRYPOINT ["attend-server"]
