//! What the process has to tell: everything that it logs from level `info` on, whatever `LARDER_LOG` says, kept for whoever
//! asks, and told to those who listen.
//!
//! There is one log in a process, as `tracing` has it. [`layer`] must be among its subscriber's.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::field::{Field, Visit};
use tracing::{Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;
use utoipa::ToSchema;

/// Events that are kept.
const KEPT: usize = 256;

/// The longest text of an event or a field that is kept whole, in bytes.
const TEXT_BYTES_MAX: usize = 2 << 10;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number in this process, from 1 on.
    pub number: u64,
    /// When, in milliseconds since 1970 (UTC).
    pub time_ms: u64,
    /// How bad it is.
    pub level: EventLevel,
    /// What has happened, for people.
    pub text: String,
    /// What it is about: the `disk`, and what else there is to say.
    pub about: BTreeMap<String, String>,
}

/// How bad an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventLevel {
    /// Not at all.
    Info,
    /// Somebody should look.
    Warning,
    /// Something has failed.
    Error,
}

/// The events of this process.
static EVENTS: LazyLock<Events> = LazyLock::new(Events::default);

/// Those that are kept, and a word for those who wait for more.
pub(super) struct Events {
    kept: Mutex<Kept>,
    newest: watch::Sender<u64>,
}

#[derive(Default)]
struct Kept {
    events: VecDeque<Arc<Event>>,
    last: u64,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            kept: Mutex::default(),
            newest: watch::Sender::new(0),
        }
    }
}

/// Those of this process.
pub(super) fn events() -> &'static Events {
    &EVENTS
}

impl Events {
    /// Those after number `after` that are still kept, the oldest first.
    pub(super) fn after(&self, after: u64) -> Vec<Arc<Event>> {
        let kept = self.kept();
        kept.events
            .iter()
            .filter(|event| event.number > after)
            .cloned()
            .collect()
    }

    /// Tells whenever there are more.
    pub(super) fn listen(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    fn add(&self, level: EventLevel, said: Said) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut kept = self.kept();
        kept.last += 1;
        let number = kept.last;
        if kept.events.len() == KEPT {
            kept.events.pop_front();
        }
        kept.events.push_back(Arc::new(Event {
            number,
            time_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            level,
            text: said.text,
            about: said.about,
        }));
        drop(kept);
        self.newest.send_replace(number);
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the log goes through to be told as events.
pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>() -> impl Layer<S> {
    ToEvents.with_filter(Targets::new().with_target("larder", Level::INFO))
}

struct ToEvents;

impl<S: Subscriber> Layer<S> for ToEvents {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let level = match *event.metadata().level() {
            Level::ERROR => EventLevel::Error,
            Level::WARN => EventLevel::Warning,
            _ => EventLevel::Info,
        };
        let mut said = Said::default();
        event.record(&mut said);
        EVENTS.add(level, said);
    }
}

#[derive(Default)]
struct Said {
    text: String,
    about: BTreeMap<String, String>,
}

impl Said {
    fn say(&mut self, field: &Field, mut text: String) {
        if text.len() > TEXT_BYTES_MAX {
            let end = (0..=TEXT_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or_default());
            text.push('…');
        }
        match field.name() {
            "message" => self.text = text,
            name => {
                self.about.insert(name.to_owned(), text);
            }
        }
    }
}

impl Visit for Said {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.say(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.say(field, format!("{value:?}"));
    }
}
