"""The browser in which the tests of the views look at pages."""

from browsing import axe, browser, open_page

__all__ = ["axe", "browser", "open_page"]
