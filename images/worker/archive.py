"""Puts packages of the working directory into one compressed archive each, from which Python imports them.

The archives hold bytecode only, and a .pth file names them. Only for packages that consist of Python code.
"""

import shutil
import sys
import zipfile
from pathlib import Path

for name in sys.argv[1:]:
    archive = Path(f"{name}.zip").resolve()
    with zipfile.PyZipFile(str(archive), "w", zipfile.ZIP_DEFLATED, optimize=0) as file:
        file.writepy(name)
    shutil.rmtree(name)
    Path(f"{name}.pth").write_text(f"{name}.zip\n")
