"""Prints the claims of all results as a Markdown table.

python -m benchmarks.table
"""

import argparse
import json
from pathlib import Path

from benchmarks import record


def main() -> None:
    """Reads results/*.json and prints one row per claim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of the results' files")
    args = parser.parse_args()
    print("| claim | target | measured | met |")
    print("|---|---|---|---|")
    for path in sorted(args.results.glob("*.json")):
        for claim in json.loads(path.read_text())["claims"]:
            met = "yes" if claim["met"] else "no"
            print(f"| {claim['claim']} | {claim['target']} | {claim['measured']:.3g} | {met} |")


if __name__ == "__main__":
    main()
