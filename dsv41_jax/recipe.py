"""The one place that imports `deepseek-recipe`, the official renderer and parser of conversations."""

from types import ModuleType


def recipe() -> ModuleType:
    """The library; ImportError says how to install it."""
    try:
        import deepseek_recipe
    except ImportError as error:
        raise ImportError("chat needs deepseek-recipe: pip install 'dsv41-jax[serve]'") from error
    return deepseek_recipe
