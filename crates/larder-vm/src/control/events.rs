//! Events of the process: everything that it logs from level `info` on, whatever `LARDER_LOG` is set to. They are
//! buffered for later requests, and streamed to subscribers. The events of each disk are also in its
//! trace ([`super::trace`]), together with changes of its state that are logged at level `debug`.
//!
//! There is one log in a process, as in `tracing`. Its subscriber must include [`layer`].

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use utoipa::ToSchema;

use super::trace::{self, KIND_FIELD};

/// Number of buffered events.
const BUFFERED_EVENTS_MAX: usize = 256;

/// Length in bytes to which the text of an event or a field is truncated.
const TEXT_BYTES_MAX: usize = 2 << 10;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Number of the event in this process, from 1.
    pub number: u64,
    /// Time, in milliseconds since 1970 (UTC).
    pub time_ms: u64,
    /// Severity.
    pub level: EventLevel,
    /// Message for the user.
    pub text: String,
    /// Further fields: the `disk` concerned, and others.
    pub about: BTreeMap<String, String>,
}

/// Severity of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventLevel {
    /// Information.
    Info,
    /// A condition that an operator should check.
    Warning,
    /// A failure.
    Error,
}

impl EventLevel {
    fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// The events of this process.
static EVENTS: LazyLock<EventBuffer> = LazyLock::new(EventBuffer::default);

/// A buffer of events, which notifies subscribers of new ones.
pub(super) struct EventBuffer {
    ring: Mutex<EventRing>,
    newest: watch::Sender<u64>,
}

#[derive(Default)]
struct EventRing {
    events: VecDeque<Arc<Event>>,
    last: u64,
}

impl Default for EventBuffer {
    fn default() -> Self {
        Self { ring: Mutex::default(), newest: watch::Sender::new(0) }
    }
}

/// Returns the events of this process.
pub(super) fn events() -> &'static EventBuffer {
    &EVENTS
}

impl EventBuffer {
    /// Returns the buffered events after number `after`, the oldest first.
    pub(super) fn after(&self, after: u64) -> Vec<Arc<Event>> {
        let kept = self.lock_ring();
        kept.events.iter().filter(|event| event.number > after).cloned().collect()
    }

    /// Returns a receiver that is notified of new events.
    pub(super) fn subscribe(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    fn push(&self, time_ms: u64, level: EventLevel, fields: EventFields) {
        let mut kept = self.lock_ring();
        kept.last += 1;
        let number = kept.last;
        if kept.events.len() == BUFFERED_EVENTS_MAX {
            kept.events.pop_front();
        }
        kept.events.push_back(Arc::new(Event { number, time_ms, level, text: fields.text, about: fields.about }));
        drop(kept);
        self.newest.send_replace(number);
    }

    fn lock_ring(&self) -> MutexGuard<'_, EventRing> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the layer that turns log records into events.
pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>() -> impl Layer<S> {
    EventLayer.with_filter(filter_fn(is_event).with_max_level_hint(Level::DEBUG))
}

/// Returns whether a log record is an event of the process, or reports a change of a disk's state.
fn is_event(record: &Metadata<'_>) -> bool {
    let is_change = || *record.level() <= Level::DEBUG && record.fields().field(KIND_FIELD).is_some();
    record.is_event() && record.target().starts_with("larder") && (is_of_process(record) || is_change())
}

fn is_of_process(record: &Metadata<'_>) -> bool {
    *record.level() <= Level::INFO
}

/// Returns the present time, in milliseconds since 1970 (UTC).
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

struct EventLayer;

impl<S: Subscriber> Layer<S> for EventLayer {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let (trace, is_of_process) = (trace::current(), is_of_process(event.metadata()));
        if trace.is_none() && !is_of_process {
            return;
        }
        let level = match *event.metadata().level() {
            Level::ERROR => EventLevel::Error,
            Level::WARN => EventLevel::Warning,
            _ => EventLevel::Info,
        };
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let time_ms = now_ms();
        if let Some(trace) = trace {
            let kind = fields.kind.clone().unwrap_or_else(|| level.name().to_owned());
            trace.push(time_ms, kind, fields.line());
        }
        if is_of_process {
            EVENTS.push(time_ms, level, fields);
        }
    }
}

#[derive(Default)]
struct EventFields {
    text: String,
    kind: Option<String>,
    about: BTreeMap<String, String>,
}

impl EventFields {
    fn record_field(&mut self, field: &Field, mut text: String) {
        truncate(&mut text, TEXT_BYTES_MAX);
        match field.name() {
            "message" => self.text = text,
            KIND_FIELD => self.kind = Some(text),
            name => {
                self.about.insert(name.to_owned(), text);
            }
        }
    }

    /// Returns the text and all fields except the disk, on one line.
    fn line(&self) -> String {
        let mut line = self.text.clone();
        for (name, value) in self.about.iter().filter(|(name, _)| *name != "disk") {
            line.push_str(&format!(" {name}={value}"));
        }
        line
    }
}

/// Truncates a text that is longer than `bytes_max`, and marks that with an ellipsis.
pub(super) fn truncate(text: &mut String, bytes_max: usize) {
    if text.len() > bytes_max {
        let end = (0..=bytes_max).rev().find(|at| text.is_char_boundary(*at));
        text.truncate(end.unwrap_or_default());
        text.push('…');
    }
}

impl Visit for EventFields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_field(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_field(field, format!("{value:?}"));
    }
}
