"""All formats of draft heads: the tables of the heads' folders.

`export_formats.py` writes only what is in a table, and `import_formats.py` refuses a tensor that is
not, and a key that may change what a layer computes.
"""

from __future__ import annotations

from ..dflash import formats as dflash
from ..dspark import formats as dspark
from ..eagle import formats as eagle
from ..eagle3 import formats as eagle3
from ..hydra import formats as hydra
from ..medusa import formats as medusa
from ..mtp import formats as mtp
from .tables import Format

FORMATS: dict[str, Format] = {
    **eagle3.FORMATS,
    **eagle.FORMATS,
    **medusa.FORMATS,
    **hydra.FORMATS,
    **dflash.FORMATS,
    **dspark.FORMATS,
    **mtp.FORMATS,
}
"""By the name that `headstart import` reports. Servers read `eagle3`, `eagle`, `medusa`, `dflash`
and `dspark` as saved here; SafeAILab, SpecForge and ModelOpt write the first two as well."""
