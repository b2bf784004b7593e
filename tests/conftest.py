"""One thread for each process, as in `make test`: small operations wait for one another, and a forked process hangs
where its parent has threads of torch."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
