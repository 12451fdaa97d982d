"""What a browser shows that opens a page of operators."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
from patience import HANG


def shown_by_page(link: str) -> dict[str, Any]:
    """The elements after the first answer, and the address; takes Node.js."""
    html = httpx.get(link, trust_env=False).content
    command = ("node", Path(__file__).with_name("page.mjs"), link)
    return json.loads(subprocess.run(command, input=html, capture_output=True, check=True, timeout=HANG).stdout)
