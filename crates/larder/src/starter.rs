//! Whoever has started this service (`$NOTIFY_SOCKET`, sd_notify(3)).

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use sd_notify::NotifyState;

/// How long he may take to hear the last word.
const LAST_WORD: Duration = Duration::from_secs(1);

/// What he is told.
pub(crate) enum News {
    /// It does what it should: this.
    Ready(String),
    /// It reads its file again; [`News::Ready`] follows.
    Reloading,
    /// It ends.
    Stopping,
}

/// He, if he wants to know how far it is. A thread tells him: he may not listen.
pub(crate) struct Starter {
    news: Sender<News>,
    ended: Receiver<()>,
}

impl Starter {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (news, to_tell) = mpsc::channel();
        let (end, ended) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("larder-notify".to_owned());
        thread.spawn(move || {
            to_tell.iter().for_each(notify);
            let _ = end.send(());
        })?;
        Ok(Self { news, ended })
    }

    pub(crate) fn tell(&self, news: News) {
        // The thread is there as long as this is.
        let _ = self.news.send(news);
    }

    pub(crate) fn end(self) {
        drop(self.news);
        let _ = self.ended.recv_timeout(LAST_WORD);
    }
}

fn notify(news: News) {
    let told = match news {
        News::Ready(status) => sd_notify::notify(&[NotifyState::Ready, NotifyState::Status(&status)]),
        News::Reloading => {
            NotifyState::monotonic_usec_now().and_then(|now| sd_notify::notify(&[NotifyState::Reloading, now]))
        }
        News::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
    };
    if let Err(error) = told {
        tracing::warn!("$NOTIFY_SOCKET: {error}");
    }
}
