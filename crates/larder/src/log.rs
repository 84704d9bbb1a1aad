//! Logging, configured by the variable `LARDER_LOG`.

mod limit;

use std::ffi::OsStr;
use std::fmt::{self, Debug};
use std::io::{self, IsTerminal, Write};

use larder_block::printable;
use limit::LogLimiter;
use tracing::field::Field;
use tracing::{Level, Metadata};
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::writer::MakeWriterExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

const LOG_VARIABLE: &str = "LARDER_LOG";
const FILTER_DEFAULT: &str = "info";
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Returns the layer that writes messages to stderr: on a terminal with colours; to systemd's journal without the
/// time, which the journal adds, and with the level as the journal's priority prefix.
pub(crate) fn layer(filter: EnvFilter) -> Box<dyn Layer<Registry> + Send + Sync> {
    let messages = tracing_subscriber::fmt::layer()
        .with_target(false)
        .fmt_fields(debug_fn(write_field).delimited(" "))
        // A line that cannot be written is lost. Reporting that on stderr, which has just failed, would panic.
        .log_internal_errors(false);
    match is_journal() {
        true => {
            let messages = messages.without_time().with_level(false).with_ansi(false);
            let limit = LogLimiter::new(|line| {
                // The priority of a warning.
                let _ = PrefixedLine { priority: 4 }.write_all(format!("{line}\n").as_bytes());
            });
            let journal = MakeWriterExt::with_filter(Journal, move |metadata| limit.allows(metadata));
            messages.with_writer(journal).with_filter(filter).boxed()
        }
        false => {
            let has_colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let messages = messages.with_ansi(has_colours);
            let limit = LogLimiter::new(|line| {
                let _ = writeln!(io::stderr(), "{line}");
            });
            let stderr = MakeWriterExt::with_filter(io::stderr, move |metadata| limit.allows(metadata));
            messages.with_writer(stderr).with_filter(filter).boxed()
        }
    }
}

/// Writes one field of a message, on one line. Names of files, images and clients in it must not look like further
/// lines, nor act as terminal control sequences.
fn write_field(writer: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    let text = printable(&format!("{value:?}"));
    match field.name() {
        "message" => writer.write_str(&text),
        name => write!(writer, "{name}={text}"),
    }
}

/// Returns true if stderr is connected to systemd's journal (systemd.exec(5), `$JOURNAL_STREAM`).
fn is_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(io::stderr()).is_ok_and(|found| stream == format!("{}:{}", found.st_dev, found.st_ino))
}

/// Writer of lines that begin with their priority (sd-daemon(3)).
struct Journal;

/// Writer of one line with its priority.
struct PrefixedLine {
    priority: u8,
}

impl<'a> MakeWriter<'a> for Journal {
    type Writer = PrefixedLine;

    fn make_writer(&'a self) -> PrefixedLine {
        PrefixedLine { priority: 6 }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> PrefixedLine {
        let priority = match *metadata.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        PrefixedLine { priority }
    }
}

impl Write for PrefixedLine {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        let mut line = format!("<{}>", self.priority).into_bytes();
        line.extend_from_slice(text);
        io::stderr().write_all(&line)?;
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the filter, and a message if the variable is invalid.
pub(crate) fn filter() -> (EnvFilter, Option<String>) {
    match std::env::var_os(LOG_VARIABLE) {
        Some(value) if !value.is_empty() => match parse_filter(&value) {
            Ok(filter) => (filter, None),
            Err(why) => {
                let valid = LEVELS.join(", ");
                let warning = format!(
                    "{LOG_VARIABLE}={}: {why}; give {valid}, or levels of parts as in info,larder_block=debug. Larder uses \
                     {FILTER_DEFAULT}",
                    value.to_string_lossy()
                );
                (FILTER_DEFAULT.into(), Some(warning))
            }
        },
        _ => (FILTER_DEFAULT.into(), None),
    }
}

/// Parses a filter. A bare word must be a level here; the library would also take it for a target, which would hide a
/// mistyped level.
fn parse_filter(value: &OsStr) -> Result<EnvFilter, String> {
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

    /// Levels are accepted alone and per target; a bare word that is no level is rejected.
    #[test]
    fn filter_accepts_levels_and_rejects_typos() {
        for text in [
            "debug",
            "TRACE",
            "off",
            "info,larder_block=debug",
            "warn, larder_export::nbd=trace",
        ] {
            assert!(parse_filter(text.as_ref()).is_ok(), "{text}");
        }
        for (text, word) in [
            ("chatty", "'chatty'"),
            ("info,larder_block=loud", "'loud'"),
            ("debug,", "''"),
            ("larder_block", "'larder_block'"),
        ] {
            let why = parse_filter(text.as_ref()).expect_err(text);
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
