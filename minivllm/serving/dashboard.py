"""`/dashboard`: a live page of the engine and its samples."""

# Generated from nbs/serving/dashboard.ipynb; after an edit here run `python -m minivllm.literate write-back`.

from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from minivllm.engine.async_llm import AsyncLLM
from minivllm.viz.assets import document
from minivllm.viz.dashboard import Dashboard

__all__ = ["dashboard_router"]


def dashboard_router(llm: AsyncLLM) -> APIRouter:
    """`/dashboard`, a page that shows the engine live, and `/dashboard/samples?after=NUMBER`, which it asks for what is new."""
    router = APIRouter()
    dashboard = Dashboard(llm, source="dashboard/samples")

    @router.get("/dashboard", response_class=HTMLResponse)
    async def page() -> str:
        """A self-contained page."""
        if not dashboard.monitor.ended:
            dashboard.start()
        return document("minivllm", dashboard.to_html())

    @router.get("/dashboard/samples")
    async def samples(after: int = -1) -> dict[str, Any]:
        """The samples after the one with this number."""
        return dashboard.new_samples(after)

    return router
