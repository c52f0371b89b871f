"""Loads plugins by name, in the order of the configuration, and calls their hooks.

The only user of pluggy. A plugin is found by its entry point in the group ``martlet.plugins``; only enabled plugins are
imported. If a plugin raises or hangs during its import or in a cold hook, the broker does not start and names the
plugin and the reason. If one fails later, in a projection, it is removed as a whole and the others continue, unless it
guards access or is required by the configuration.
"""

import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations
from traceback import walk_tb
from typing import Any, Final, TypeVar, final

import pluggy
import trio
from msgspec import Struct
from msgspec.structs import replace

from martlet.config import Settings, fill, unknown_key
from martlet.contracts import (
    AccessKey,
    Authenticator,
    Authorizer,
    Challenge,
    Compile,
    Condition,
    Credentials,
    Decider,
    Exchange,
    Identity,
    LoginOrigin,
    Mechanism,
    Network,
    Password,
    PasswordCheck,
    Predicate,
    Protocol,
    Proved,
    Question,
    Quota,
    QuotaSource,
    RecordView,
    Router,
    SigningSecret,
    Stage,
    Subcommand,
    Verdict,
)
from martlet.errors import ConfigError, MartletError, PluginError, Reason, Refused
from martlet.net.addresses import show_address, split_listen
from martlet.plugins.hooks import HOOKS, Hooks
from martlet.runtime.installed import EntryPoint, entry_points

__all__ = [
    "GROUP",
    "Plugin",
    "Plugins",
    "available",
    "guarded_authenticator",
    "guarded_authorizer",
    "guarded_filter",
    "guarded_mechanism",
    "guarded_quotas",
    "guards_access",
    "has_commands",
    "load",
    "load_class",
]

log = logging.getLogger("martlet.plugins")

GROUP: Final = "martlet.plugins"
# A cold hook reads config and builds objects; a second is long, and ten is a hang.
HOOK_TIMEOUT_S: Final = 10.0
# A large library on a cold, busy disk takes some seconds to import.
IMPORT_TIMEOUT_S: Final = 30.0
# Without these hooks a broker would admit clients that it must not.
GUARDS: Final = frozenset({"martlet_authenticators", "martlet_authorizers", "martlet_mechanisms"})

# Hosts that mean all addresses of the machine.
EVERY_HOST: Final = frozenset(("", "0.0.0.0", "::"))

T = TypeVar("T")


class Plugin(Struct, frozen=True):
    """One loaded plugin; ``hooks`` are the names of the hooks that it overrides."""

    name: str
    hooks: tuple[str, ...]


def available() -> dict[str, EntryPoint]:
    """Return every installed plugin's entry point by the plugin's name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(GROUP)}


class _Pluggy(pluggy.PluginManager):
    """A pluggy manager for which a method that overrides one of `Hooks` is an implementation."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if name.startswith("martlet_") and getattr(type(plugin), name, None) is not getattr(Hooks, name, None):
            return {}
        return None


@final
class Plugins:
    """The enabled plugins, in the order of the configuration."""

    def __init__(self, required: Collection[str] = ()) -> None:
        self._required = frozenset(required)
        self._pluggy = _Pluggy("martlet")
        self._pluggy.add_hookspecs(Hooks)
        self._loaded: dict[str, Plugin] = {}
        self._packages: dict[str, str] = {}  # the outermost package of each plugin's class
        self.failed: dict[str, str] = {}
        self.reloaded: list[Callable[[], None]] = []  # called after all plugins have reloaded

    def add(self, name: str, plugin: Hooks) -> None:
        """Add *plugin* under *name*.

        Raises:
          PluginError: it overrides a hook that does not exist, or with other arguments.
        """
        unknown = [n for n in dir(type(plugin)) if n.startswith("martlet_") and n not in HOOKS]
        if unknown:
            raise PluginError(f"plugin {name!r} overrides {unknown[0]!r}, which is no hook; hooks: {', '.join(HOOKS)}")
        try:
            self._pluggy.register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name!r} does not fit; {error}") from error
        self._packages[name] = _package_of(type(plugin).__module__)
        self._loaded[name] = Plugin(name, tuple(h for h in HOOKS if self._implementation(name, h)))

    def __iter__(self) -> Any:
        return iter(list(self._loaded.values()))

    def _implementation(self, name: str, hook: str) -> Any:
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            if implementation.plugin_name == name:
                return implementation
        return None

    async def call(self, hook: str, **arguments: object) -> list[tuple[str, Any]]:
        """Return (plugin, result) of *hook* for every plugin that overrides it.

        Raises:
          PluginError: a plugin failed or hung; the text names it.
        """
        results: list[tuple[str, Any]] = []
        for name in list(self._loaded):
            implementation = self._implementation(name, hook)
            if implementation is None:
                continue
            values = [arguments[argument] for argument in implementation.argnames]
            try:
                result = await _bounded(implementation.function, values)
                _check_result(hook, result)
                results.append((name, result))
            except Exception as error:
                text = f"plugin {name!r} failed in {hook}; {_error_text(error, self._packages[name])}"
                raise PluginError(text) from error
        return results

    async def tell(self, hook: str, timeout_s: float = HOOK_TIMEOUT_S) -> None:
        """Call *hook*, which returns nothing, of all plugins concurrently while the broker runs.

        If a plugin fails, or hangs for *timeout_s*, the failure is logged with its name; the others are not affected.
        """
        async with trio.open_nursery() as nursery:
            for name in list(self._loaded):
                implementation = self._implementation(name, hook)
                if implementation is not None:
                    nursery.start_soon(self._tell, name, hook, implementation.function, timeout_s)

    async def _tell(self, name: str, hook: str, function: Callable[[], None], timeout_s: float) -> None:
        try:
            await _bounded(function, [], timeout_s)
        except Exception as error:
            told = _error_text(error, self._packages[name])
            if isinstance(error, MartletError):
                told = f"{type(error).__name__}: {told}"
            log.error("plugin %r failed in %s; %s", name, hook, told)

    def take_out(self, name: str) -> bool:
        """Remove plugin *name*; return whether it guards access."""
        guards = GUARDS.intersection(self._loaded[name].hooks)
        self._pluggy.unregister(name=name)
        del self._loaded[name]
        return bool(guards)

    def leave_out(self, name: str, what: str, error: Exception, *, guards: bool = False) -> None:
        """Continue without plugin *name*, which failed while the broker runs.

        Raises:
          PluginError: it guards access, or the configuration requires it.
        """
        text = f"plugin {name!r} {what}; {_error_text(error, self._packages.get(name, ''))}"
        self.failed[name] = text
        if guards:
            raise PluginError(f"{text}; it guards access, so the broker does not run without it") from error
        if name in self._required:
            raise PluginError(f"{text}; plugins.required names it, so the broker does not run without it") from error
        log.error("%s; the plugin is removed, the others continue", text)


def _error_text(error: Exception, package: str) -> str:
    """Return the text of *error*; unless it is one of our own errors, with its type and where in *package* it began."""
    if isinstance(error, MartletError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        if package and _package_of(frame.f_globals.get("__name__", "")) == package:
            place = f" ({frame.f_code.co_filename}:{line})"
    return f"{type(error).__name__}: {error}{place}"


def _cannot_import(name: str, entry: EntryPoint, error: Exception) -> PluginError:
    return PluginError(f"plugin {name!r} cannot be imported; {_error_text(error, _package_of(entry.module))}")


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _check_result(hook: str, result: object) -> None:
    """Raise `PluginError` if *hook* must not return *result*, because a ``return`` is missing for example."""
    if hook in MAPPINGS:
        if not isinstance(result, Mapping):
            raise PluginError(f"it returned {result!r}; return a mapping")
        return
    if hook not in SEQUENCES:
        return
    what, fits = SEQUENCES[hook]
    if isinstance(result, str) or not isinstance(result, Collection):
        raise PluginError(f"it returned {result!r}; return a sequence of {what}")
    for each in result:
        if not fits(each):
            raise PluginError(f"it returned a sequence with {each!r}; return a sequence of {what}")


def _is_projection(each: object) -> bool:
    return all(hasattr(each, name) for name in ("name", "topics", "apply", "freeze", "restore", "floor", "roll"))


def _is_cold_tier(each: object) -> bool:
    names = ("name", "begin", "released", "reason", "release", "read", "record_at", "records_by_key")
    return all(hasattr(each, name) for name in (*names, "offset_by_time", "offset_by_position"))


# Types of hooks' results: mappings, or sequences of these types.
MAPPINGS: Final = frozenset({"martlet_filters", "martlet_capabilities", "martlet_dispatchers", "martlet_mechanisms"})
SEQUENCES: Final[dict[str, tuple[str, Callable[[object], bool]]]] = {
    "martlet_protocols": ("Protocol", lambda each: isinstance(each, Protocol)),
    "martlet_stages": ("Stage", lambda each: isinstance(each, Stage)),
    "martlet_routers": ("Router", lambda each: isinstance(each, Router)),
    "martlet_authenticators": ("functions", callable),
    "martlet_authorizers": ("functions or objects with decide", lambda each: callable(each) or hasattr(each, "decide")),
    "martlet_quotas": ("functions", callable),
    "martlet_projections": ("Projection", _is_projection),
    "martlet_cold_tiers": ("ColdTier", _is_cold_tier),
    "martlet_services": ("functions", callable),
    "martlet_commands": ("Subcommand", lambda each: isinstance(each, Subcommand)),
}


async def _bounded(function: Callable[..., T], values: list[object], timeout_s: float = HOOK_TIMEOUT_S) -> T:
    """Call *function* in a thread, and stop waiting for it if it hangs."""
    with trio.move_on_after(timeout_s):
        return await trio.to_thread.run_sync(function, *values, abandon_on_cancel=True)
    raise PluginError(f"it did not return within {timeout_s:g} s")


def guarded_authenticator(plugin: str, authenticator: Authenticator) -> Authenticator:
    """Return *authenticator* wrapped so that an error or an invalid result becomes a refusal that names the plugin."""

    def failed(error: Exception) -> Refused:
        log.exception("plugin %r failed in its authenticator", plugin)
        return _guard_failed(plugin, "authenticator", error)

    def guarded(check: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            try:
                return check()
            except Refused:
                raise
            except Exception as error:
                raise failed(error) from error

        return run

    def ask(credentials: Credentials, origin: LoginOrigin) -> Identity | PasswordCheck | SigningSecret | None:
        try:
            answer = authenticator(credentials, origin)
            if isinstance(answer, PasswordCheck) and isinstance(credentials, Password):
                return replace(answer, check=guarded(answer.check))
            wanted = SigningSecret if isinstance(credentials, AccessKey) else Identity
            if answer is not None and not isinstance(answer, wanted):
                text = "return Identity, PasswordCheck for a password, SigningSecret for an access key, or None"
                raise TypeError(f"it returned {answer!r:.80}; {text}")
            return answer
        except Refused:
            raise
        except Exception as error:
            raise failed(error) from error

    return ask


def guarded_mechanism(plugin: str, name: str, mechanism: Mechanism) -> Mechanism:
    """Return *mechanism* wrapped so that an error or an invalid result becomes a refusal that names the plugin."""

    def failed(error: Exception) -> Refused:
        log.exception("plugin %r failed in its mechanism %s", plugin, name)
        return _guard_failed(plugin, f"mechanism {name}", error)

    def begin() -> Exchange:
        try:
            exchange = mechanism()
        except Exception as error:
            raise failed(error) from error

        def proceed(data: bytes) -> Challenge | Proved:
            try:
                result = exchange(data)
                if not isinstance(result, Challenge | Proved):
                    raise TypeError(f"it returned {result!r:.80}; return Challenge or Proved")
                return result
            except Refused:
                raise
            except Exception as error:
                raise failed(error) from error

        return proceed

    return begin


def guarded_authorizer(plugin: str, authorizer: Authorizer) -> Authorizer:
    """Return *authorizer* wrapped so that an error or an invalid result becomes a refusal that names the plugin."""
    if not callable(authorizer):
        return _GuardedDecider(plugin, authorizer)

    def ask(identity: Identity, action: str, name: str) -> bool | None:
        return _ask_guarded(plugin, bool, lambda: authorizer(identity, action, name))

    return ask


@final
class _GuardedDecider:
    """A `Decider` whose errors and invalid results are refusals that name the plugin."""

    def __init__(self, plugin: str, decider: Decider) -> None:
        self._plugin = plugin
        self._decider = decider

    @property
    def networks(self) -> Collection[Network]:
        return self._decider.networks

    def decide(self, question: Question) -> Verdict | None:
        return _ask_guarded(self._plugin, Verdict, lambda: self._decider.decide(question))


def _ask_guarded(plugin: str, kind: type[T], ask: Callable[[], T | None]) -> T | None:
    try:
        result = ask()
        if result is not None and not isinstance(result, kind):
            raise TypeError(f"it returned {result!r:.80}; return {kind.__name__} or None")
        return result
    except Refused:
        raise
    except Exception as error:
        log.exception("plugin %r failed in its authorizer", plugin)
        raise _guard_failed(plugin, "authorizer", error) from error


def _guard_failed(plugin: str, what: str, error: Exception) -> Refused:
    return Refused(Reason.UNAVAILABLE, f"plugin {plugin!r} failed in its {what}; {type(error).__name__}: {error}")


def guarded_quotas(plugin: str, source: QuotaSource) -> QuotaSource:
    """Return *source* wrapped so that an error or an invalid result becomes a refusal that names the plugin."""

    def ask(identity: Identity) -> Sequence[Quota]:
        try:
            quotas = tuple(source(identity))
            if not all(isinstance(quota, Quota) for quota in quotas):
                raise TypeError(f"it returned {quotas!r:.80}; return quotas")
            if len({quota.group for quota in quotas}) < len(quotas):
                raise ValueError(f"it returned two quotas of one group, or of {identity.name!r}; return one of each")
            return quotas
        except Refused:
            raise
        except Exception as error:
            log.exception("plugin %r failed in its quotas", plugin)
            raise _guard_failed(plugin, "quotas", error) from error

    return ask


def guarded_filter(plugin: str, language: str, compile_expression: Compile) -> Compile:
    """Return *compile_expression* wrapped so that errors of it and its predicates are refusals that name the plugin.

    Each compiled expression is logged once at most.
    """

    def failed(error: Exception) -> Refused:
        text = f"plugin {plugin!r} failed in its filter {language}; {type(error).__name__}: {error}"
        return Refused(Reason.UNAVAILABLE, text)

    def compile_guarded(expression: str) -> Predicate:
        try:
            predicate = compile_expression(expression)
        except Refused:
            raise
        except Exception as error:
            log.exception("plugin %r failed to compile %r for its filter %s", plugin, expression[:80], language)
            raise failed(error) from error
        told = False

        def fails(error: Exception) -> Refused:
            nonlocal told
            if not told:
                told = True
                log.exception("plugin %r failed in its filter %s on %r", plugin, language, expression[:80])
            return failed(error)

        condition = predicate if isinstance(predicate, Condition) else None
        decide = predicate if condition is None else condition.holds

        def holds(record: RecordView) -> bool:
            try:
                return decide(record)
            except Refused:
                raise
            except Exception as error:
                raise fails(error) from error

        if condition is None:
            return holds
        search = condition.find

        def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
            try:
                return search(data, begin, end) if search is not None else None
            except Exception as error:
                raise fails(error) from error

        return Condition(holds, condition.cost, None if search is None else find, condition.steps)

    return compile_guarded


def load(
    names: Sequence[str],
    tables: Mapping[str, object],
    required: Collection[str] = (),
    installed: Mapping[str, EntryPoint] | None = None,
) -> Plugins:
    """Import and configure the plugins *names*; a plugin's section of *tables* has its name.

    *installed* is the result of `available`, for callers that have it: `available` reads the metadata of all packages.

    Raises:
      ConfigError: a section does not fit, a plugin is named twice, a required plugin is not enabled, the order is not
        what a plugin needs, or two plugins have the same address in their keys ``listen``.
      PluginError: a plugin is not installed, or is not one, or cannot be imported.
    """
    if installed is None:
        installed = available()
    plugins = Plugins(required)
    missing = [name for name in required if name not in names]
    if missing:
        raise ConfigError(f"plugin {missing[0]!r} is in plugins.required and not in plugins.enabled; add it there")
    configs: dict[str, object] = {}
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"plugin {name!r} is in plugins.enabled {names.count(name)} times; name it once")
        if name not in installed:
            raise PluginError(f"plugin {name!r} is not installed; installed: {', '.join(sorted(installed)) or 'none'}")
        entry = installed[name]
        try:
            made, configs[name] = _make(name, entry, tables.get(name, {}))
        except (ConfigError, PluginError):
            raise
        except Exception as error:
            raise _cannot_import(name, entry, error) from error
        for other, reason in made.before.items():
            if other in configs:
                raise ConfigError(f"plugin {name!r} must come before {other!r} in plugins.enabled; {reason}")
        plugins.add(name, made)
    _check_addresses(configs)
    return plugins


def _check_addresses(configs: Mapping[str, object]) -> None:
    """Raise `ConfigError` if the keys ``listen`` of two plugins have the same address; *configs* are by plugin."""
    addresses: list[tuple[str, tuple[str, int]]] = []
    for name, config in configs.items():
        listen = getattr(config, "listen", None)
        if isinstance(listen, str):
            with suppress(ConfigError):  # the plugin itself handles a value that is no address
                addresses += [(name, address) for address in split_listen(listen)]
    for (first, taken), (second, wanted) in combinations(addresses, 2):
        if first != second and _overlap(taken, wanted):
            text = f"where plugin {first!r} listens with {show_address(*taken)!r}; choose another port"
            raise ConfigError(f"config key '{second}.listen' is {show_address(*wanted)!r}, {text}")


def _overlap(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Return whether only one of two addresses can be bound; host names are compared as text."""
    (host, port), (other_host, other_port) = one, other
    if not port or port != other_port:
        return False
    if "::" in (host, other_host):  # it takes clients of IPv4, too
        return True
    if (":" in host) != (":" in other_host):
        return False
    return host == other_host or not EVERY_HOST.isdisjoint((host, other_host))


def load_class(name: str, entry: EntryPoint) -> type[Hooks]:
    """Import the class of plugin *name*.

    Raises:
      PluginError: it is not one, or its import fails or hangs, whose thread is left alone.
    """
    try:
        kind = _in_time(entry.load)
    except Exception as error:
        raise _cannot_import(name, entry, error) from error
    if not (isinstance(kind, type) and issubclass(kind, Hooks)):
        raise PluginError(f"plugin {name!r} is {entry.value}, which is not a subclass of martlet.plugins.hooks.Hooks")
    config: object = kind.config_class
    if config is not None and not (isinstance(config, type) and issubclass(config, Settings)):
        text = f"its config_class {config!r} is not a subclass of martlet.config.Settings"
        raise PluginError(f"plugin {name!r} is {entry.value}; {text}")
    return kind


def guards_access(name: str, entry: EntryPoint) -> bool:
    """Return whether plugin *name* authenticates or authorizes clients. Raises as `load_class`."""
    kind = load_class(name, entry)
    return any(getattr(kind, hook) is not getattr(Hooks, hook) for hook in GUARDS)


def has_commands(name: str, entry: EntryPoint) -> bool:
    """Return whether plugin *name* overrides ``martlet_commands``, or cannot be imported, which `load` explains.

    Only then is it created for the command line, where it has no configuration.
    """
    try:
        return load_class(name, entry).martlet_commands is not Hooks.martlet_commands
    except Exception:  # any error of its import; `load` raises it again with an explanation
        return True


def _in_time(function: Callable[..., T], *values: object) -> T:
    """Call *function* of a plugin in a thread, and stop waiting when it hangs."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function(*values))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="martlet-plugin", daemon=True)
    with _interrupted_later():
        thread.start()
        thread.join(IMPORT_TIMEOUT_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it did not return within {IMPORT_TIMEOUT_S:g} s")
    return results[0]


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Delay Ctrl-C until the block ends: while extension modules are loaded, it makes them crash, or they lose it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _make(name: str, entry: EntryPoint, table: object) -> tuple[Hooks, object]:
    """Return the plugin and its configuration."""
    kind = load_class(name, entry)
    if not isinstance(table, dict):
        raise ConfigError(f"config key {name!r} is a value; it must be a section")
    if kind.config_class is None:
        if table:
            raise ConfigError(unknown_key(f"{name}.{next(iter(table))}", []) + "; this plugin has no settings")
        return _in_time(kind, None), None
    config: object = fill(kind.config_class, table, name)
    return _in_time(kind, config), config
