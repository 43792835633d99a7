"""`python -m services.decode`: the decode worker as a process."""

import sys

from common.config import DecodeSettings, load
from common.runtime.service import run_service
from common.runtime.worker_process import serve_worker
from services.decode.service import DecodeService


def main() -> None:
    settings = load(DecodeSettings, sys.argv[1:])
    run_service(settings, lambda context: serve_worker(settings, context, DecodeService))


if __name__ == "__main__":
    main()
