"""`python -m services.prefill`: the prefill worker as a process."""

import sys

from common.config import PrefillSettings, load
from common.runtime.service import run_service
from common.runtime.worker_process import serve_worker
from services.prefill.service import PrefillService


def main() -> None:
    settings = load(PrefillSettings, sys.argv[1:])
    run_service(settings, lambda context: serve_worker(settings, context, PrefillService))


if __name__ == "__main__":
    main()
