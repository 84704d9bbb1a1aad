//! Logging, configured by the variable `LARDER_LOG`.
//!
//! There are two kinds of lines. Messages of level `info` and above are for users. Messages of the levels `debug` and
//! `trace`, which a user has to enable, begin with the spans that they are in (a disk, a session, a move, a pager) and
//! with their module. All spans have the level `debug`.

mod limit;

use std::ffi::OsStr;
use std::fmt::{self, Debug};
use std::io::{self, IsTerminal, Write};

use larder_block::printable;
use larder_vm::control::trace::KIND_FIELD;
use limit::LogLimiter;
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::writer::MakeWriterExt;
use tracing_subscriber::fmt::{FormatFields, MakeWriter};
use tracing_subscriber::layer::Filter;
use tracing_subscriber::{EnvFilter, Layer, Registry};

const LOG_VARIABLE: &str = "LARDER_LOG";
const FILTER_DEFAULT: &str = "info";
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Layers of one kind of lines each.
type Layers = Vec<Box<dyn Layer<Registry> + Send + Sync>>;

/// Returns the layers that write messages to stderr: on a terminal with colours; to systemd's journal without the
/// time, which the journal adds, and with the level as the journal's priority prefix.
pub(crate) fn layers(levels: &Levels) -> Layers {
    match is_journal() {
        true => {
            let limit = LogLimiter::new(|line| {
                // The priority of a warning.
                let _ = PrefixedLine { priority: 4 }.write_all(format!("{line}\n").as_bytes());
            });
            let limited = MakeWriterExt::with_filter(Journal, move |metadata| limit.allows(metadata));
            let messages = lines().with_target(false).without_time().with_level(false);
            let details = lines().without_time().with_level(false);
            levels.select(messages.with_ansi(false).with_writer(limited), details.with_ansi(false).with_writer(Journal))
        }
        false => {
            let has_colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            let limit = LogLimiter::new(|line| {
                let _ = writeln!(io::stderr(), "{line}");
            });
            let limited = MakeWriterExt::with_filter(io::stderr, move |metadata| limit.allows(metadata));
            let messages = lines().with_target(false).with_ansi(has_colours);
            levels.select(messages.with_writer(limited), lines().with_ansi(has_colours).with_writer(io::stderr))
        }
    }
}

/// Returns a layer that writes a line for each message.
fn lines() -> tracing_subscriber::fmt::Layer<Registry, Fields> {
    // A line that cannot be written is lost. Reporting that on stderr, which has just failed, would panic.
    let lines = tracing_subscriber::fmt::layer().log_internal_errors(false);
    lines.fmt_fields(Fields)
}

/// The enabled levels, by part of the program: the valid text of a filter.
#[derive(Debug)]
pub(crate) struct Levels(String);

impl Levels {
    /// Returns the layers for enabled messages of level `info` and above, and for enabled `details` with their spans.
    fn select(
        &self,
        messages: impl Layer<Registry> + Send + Sync,
        details: impl Layer<Registry> + Send + Sync,
    ) -> Layers {
        let is_message = |record: &Metadata<'_>| record.is_event() && *record.level() <= Level::INFO;
        let is_detail = |record: &Metadata<'_>| record.is_span() || *record.level() > Level::INFO;
        vec![
            messages.with_filter(self.filter(is_message, Level::INFO)).boxed(),
            details.with_filter(self.filter(is_detail, Level::TRACE)).boxed(),
        ]
    }

    /// Returns a filter for the enabled records that `also` accepts, none of which is more verbose than `level_max`.
    fn filter(&self, also: fn(&Metadata<'_>) -> bool, level_max: Level) -> impl Filter<Registry> + use<> {
        let enabled = EnvFilter::try_new(&self.0).unwrap_or_else(|_| FILTER_DEFAULT.into());
        FilterExt::<Registry>::and(enabled, filter_fn(also).with_max_level_hint(level_max))
    }
}

/// Format of the fields of a message or a span: on one line, without the kind of an event, which is for the disk's
/// trace only.
struct Fields;

impl<'writer> FormatFields<'writer> for Fields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut line = FieldLine { writer, is_empty: true, result: Ok(()) };
        fields.record(&mut line);
        line.result
    }
}

/// Line of fields that is being written.
struct FieldLine<'writer> {
    writer: Writer<'writer>,
    is_empty: bool,
    result: fmt::Result,
}

impl Visit for FieldLine<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if field.name() == KIND_FIELD || self.result.is_err() {
            return;
        }
        let is_first = std::mem::replace(&mut self.is_empty, false);
        let delimiter = if is_first { "" } else { " " };
        self.result = self.writer.write_str(delimiter);
        if self.result.is_ok() {
            self.result = write_field(&mut self.writer, field, value);
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

/// Returns the levels that the variable enables, and a message if it is invalid.
pub(crate) fn levels() -> (Levels, Option<String>) {
    let default = || Levels(FILTER_DEFAULT.to_owned());
    match std::env::var_os(LOG_VARIABLE) {
        Some(value) if !value.is_empty() => match parse_levels(&value) {
            Ok(levels) => (levels, None),
            Err(why) => {
                let valid = LEVELS.join(", ");
                let warning = format!(
                    "{LOG_VARIABLE}={}: {why}; give {valid}, or levels of parts as in info,larder_block=debug. Larder uses \
                     {FILTER_DEFAULT}",
                    value.to_string_lossy()
                );
                (default(), Some(warning))
            }
        },
        _ => (default(), None),
    }
}

/// Parses a filter. A bare word must be a level here; the library would also take it for a target, which would hide a
/// mistyped level.
fn parse_levels(value: &OsStr) -> Result<Levels, String> {
    let text = value.to_str().ok_or("it is not UTF-8")?;
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    for part in &parts {
        let level = part.rsplit_once('=').map_or(*part, |(_, level)| level);
        if !LEVELS.iter().any(|known| known.eq_ignore_ascii_case(level)) {
            return Err(format!("'{level}' is not a level"));
        }
    }
    let text = parts.join(",");
    EnvFilter::try_new(&text).map_err(|error| error.to_string())?;
    Ok(Levels(text))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use larder_vm::control::events;
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// Writer into memory.
    #[derive(Clone, Default)]
    struct MemoryWriter(Arc<Mutex<Vec<u8>>>);

    impl Write for MemoryWriter {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no thread has panicked").write(text)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns the lines that a fixed series of messages produces with these levels, without times and levels.
    fn written(levels: &str) -> Vec<String> {
        let memory = MemoryWriter::default();
        let (one, other) = (memory.clone(), memory.clone());
        let messages = lines().with_target(false).without_time().with_level(false);
        let details = lines().without_time().with_level(false);
        let layers = Levels(levels.to_owned()).select(
            messages.with_ansi(false).with_writer(move || one.clone()),
            details.with_ansi(false).with_writer(move || other.clone()),
        );
        let log = tracing_subscriber::registry().with(layers).with(events::layer());
        tracing::subscriber::with_default(log, || {
            let _disk = tracing::debug_span!("disk", name = %"vda").entered();
            tracing::info!(event = "limits", disk = %"a\nb", count = 2, "limits set");
            let session = tracing::debug_span!("nbd", client = 7);
            tracing::debug!(parent: &session, event = "nbd-connected", "a client");
            tracing::warn!(parent: &session, why = "EOF", event = "nbd-disconnected");
            tracing::trace!("a message");
        });
        let text = memory.0.lock().expect("no thread has panicked").clone();
        let text = String::from_utf8(text).expect("text");
        text.lines().map(str::to_owned).collect()
    }

    /// Lines of the levels `info` and above have no kinds of events, no spans and no modules, whatever is enabled.
    #[test]
    fn only_debug_lines_have_spans() {
        let (limits, why) = ("limits set disk=a\\u000ab count=2", "why=\"EOF\"");
        let module = module_path!();
        assert_eq!(written("info"), [limits, why]);
        assert_eq!(written("off"), [""; 0]);
        let client = format!("disk{{name=vda}}:nbd{{client=7}}: {module}: a client");
        assert_eq!(written("debug"), [limits, &client, why]);
        let message = format!("disk{{name=vda}}: {module}: a message");
        assert_eq!(written("trace"), [limits, &client, why, &message]);
        assert_eq!(written("info,larder_block=debug"), [limits, why]);
    }

    /// Levels are accepted alone and per target; a bare word that is no level is rejected.
    #[test]
    fn filter_accepts_levels_and_rejects_typos() {
        for text in ["debug", "TRACE", "off", "info,larder_block=debug", "warn, larder_export::nbd=trace"] {
            assert!(parse_levels(text.as_ref()).is_ok(), "{text}");
        }
        for (text, word) in [
            ("chatty", "'chatty'"),
            ("info,larder_block=loud", "'loud'"),
            ("debug,", "''"),
            ("larder_block", "'larder_block'"),
        ] {
            let why = parse_levels(text.as_ref()).expect_err(text);
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
