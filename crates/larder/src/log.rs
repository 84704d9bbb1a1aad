//! What is logged: `LARDER_LOG`.

use std::ffi::OsStr;

use tracing_subscriber::EnvFilter;

const VARIABLE: &str = "LARDER_LOG";
const USUAL: &str = "info";
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The filter, and what is wrong with the variable if it cannot be used.
pub(crate) fn filter() -> (EnvFilter, Option<String>) {
    match std::env::var_os(VARIABLE) {
        Some(value) if !value.is_empty() => match read(&value) {
            Ok(filter) => (filter, None),
            Err(why) => {
                let valid = LEVELS.join(", ");
                let wrong = format!(
                    "{VARIABLE}={}: {why}; give {valid}, or levels of parts as in info,larder_block=debug. It is taken \
                     for {USUAL}",
                    value.to_string_lossy()
                );
                (USUAL.into(), Some(wrong))
            }
        },
        _ => (USUAL.into(), None),
    }
}

/// A word alone is a level here. To the library it could also be a part's name, which a mistyped level never means.
fn read(value: &OsStr) -> Result<EnvFilter, String> {
    let text = value.to_str().ok_or("it is not UTF-8")?;
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    for part in &parts {
        let level = part.rsplit_once('=').map_or(*part, |(_, level)| level);
        if !LEVELS.iter().any(|known| known.eq_ignore_ascii_case(level)) {
            return Err(format!("'{level}' is not a level"));
        }
    }
    EnvFilter::try_new(parts.join(",")).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_alone_and_of_parts_are_read_and_typing_errors_are_not() {
        for text in [
            "debug",
            "TRACE",
            "off",
            "info,larder_block=debug",
            "warn, larder_export::nbd=trace",
        ] {
            assert!(read(text.as_ref()).is_ok(), "{text}");
        }
        for (text, word) in [
            ("chatty", "'chatty'"),
            ("info,larder_block=loud", "'loud'"),
            ("debug,", "''"),
            ("larder_block", "'larder_block'"),
        ] {
            let why = read(text.as_ref()).expect_err(text);
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
