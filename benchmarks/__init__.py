"""How much steering costs, measured side by side with the plain dense way of doing it.

Importing this package before torch keeps everything to one thread: on some builds (aarch64 with OpenBLAS)
torch.set_num_threads does not reach the threads of the linear algebra, which then spin and count as CPU seconds.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
