"""llama.cpp's HTTP server on a loopback port: GGUF_FILE PORT SEQUENCES LENGTH THREADS."""

import signal
import sys

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    """Serve until SIGTERM."""
    file, port, sequences, length, threads = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.n_parallel = int(sequences)
    params.n_ctx = int(sequences) * int(length)
    params.cache_prompt = False
    params.cpuparams.n_threads = int(threads)
    params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}, xllamacpp {xllamacpp.__version__}", flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])


if __name__ == "__main__":
    main()
