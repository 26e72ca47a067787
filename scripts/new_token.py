"""Makes the secrets of containers, and shows none of them. Needs only Python 3.11 and its standard library.

    python3 scripts/new_token.py env .env [--rotate]      adds what is missing to a file that Compose reads
    python3 scripts/new_token.py secret JOB | kubectl create -f -

`horizonml token` is for devices; this works where only Docker or kubectl is installed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSWORD = "GRAFANA_PASSWORD"  # noqa: S105  (the name of a variable)


def main() -> None:
    """Run the command line."""
    if sys.version_info < (3, 11):
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    env = kinds.add_parser("env", help="write a file of variables that Compose reads")
    env.add_argument("file", type=Path)
    env.add_argument("--rotate", action="store_true", help="replace the token that it has")
    secret = kinds.add_parser("secret", help="print a Secret with a new token for a job")
    secret.add_argument("job")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if arguments.kind == "env":
        write_env(arguments.file, arguments.rotate)
    elif sys.stdout.isatty():
        sys.exit("this prints a token, so send it to where it belongs: ... secret JOB | kubectl create -f -")
    else:
        print_secret(arguments.job)


def write_env(file: Path, rotate: bool) -> None:
    """Add a token and a password to a file, if they are missing, and leave everything else in it as it is."""
    from horizonml.errors import SecurityError
    from horizonml.files import write_atomically
    from horizonml.security.token import TOKEN, make_token, parse_token

    lines = file.read_text().splitlines() if file.exists() else []
    values = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    token = None
    if values.get(TOKEN) and not rotate:
        try:
            token = parse_token(values[TOKEN], f"{TOKEN} in {file}")
        except SecurityError as error:
            sys.exit(f"error: {error}; `make token ROTATE=1` replaces it")
    kept = token is not None
    token = token or make_token()
    new = {TOKEN: token.text, PASSWORD: values.get(PASSWORD) or secrets.token_urlsafe(18)}
    lines = [line for line in lines if line.split("=", 1)[0] not in new]
    lines += [f"{name}={value}" for name, value in new.items()]
    write_atomically(file, "".join(f"{line}\n" for line in lines).encode(), mode=0o600)
    print(f"{file}: {'the' if kept else 'a new'} token ({token.id}), and the password of Grafana's user admin")


def print_secret(job: str) -> None:
    """Print a Kubernetes Secret with a new token."""
    from horizonml.security.token import make_token

    print(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"{job}-token"},
                "type": "Opaque",
                "stringData": {"token": make_token().text},
            }
        )
    )


if __name__ == "__main__":
    main()
