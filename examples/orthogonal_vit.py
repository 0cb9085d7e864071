"""A vision transformer with orthogonal attention heads."""

import runpy
import sys
from pathlib import Path

papers = Path(__file__).parents[1] / "benchmarks" / "papers"
sys.path.insert(0, str(papers))
runpy.run_path(str(papers / "orthogonal_vit.py"), run_name="__main__")
