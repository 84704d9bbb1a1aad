//! Libraries that are loaded when they are first asked for.

use std::error::Error;

/// Why one cannot be loaded, in the loader's words where it has any (dlerror(3)).
pub(crate) fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
