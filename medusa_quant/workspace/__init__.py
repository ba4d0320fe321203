"""Converted folders: names, sharding, layouts, manifest, atomic writing and reading back."""

from .manifest import Manifest
from .reader import Workspace, workspace_heads

__all__ = ["Manifest", "Workspace", "workspace_heads"]
