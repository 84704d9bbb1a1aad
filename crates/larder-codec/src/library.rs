//! Shared libraries that are loaded at their first use.

use std::error::Error;

/// Returns the reason why a library cannot be loaded: the message of the loader, if it has one (dlerror(3)).
pub(crate) fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
