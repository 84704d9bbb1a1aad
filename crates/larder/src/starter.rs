//! Notifications to the service manager (`$NOTIFY_SOCKET`, sd_notify(3)).

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use sd_notify::NotifyState;

/// Maximum time to deliver the last notification.
const LAST_WORD: Duration = Duration::from_secs(1);

/// State that is reported to the service manager.
pub(crate) enum News {
    /// The service works; the text becomes its status.
    Ready(String),
    /// The service rereads its configuration; [`News::Ready`] follows.
    Reloading,
    /// The service is stopping.
    Stopping,
}

/// Sender of notifications. A separate thread sends them, so that a stalled service manager cannot block the service.
pub(crate) struct Starter {
    news: Sender<News>,
    ended: Receiver<()>,
}

impl Starter {
    /// Connects to the service manager, if there is one. A process that will be confined must do that before, because
    /// it cannot create sockets afterwards.
    pub(crate) fn new() -> io::Result<Self> {
        let manager = manager();
        let (news, to_tell) = mpsc::channel();
        let (end, ended) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("larder-notify".to_owned());
        thread.spawn(move || {
            for news in to_tell {
                if let Some(manager) = &manager
                    && let Err(error) = notify(manager, &news)
                {
                    tracing::warn!("$NOTIFY_SOCKET: {error}");
                }
            }
            let _ = end.send(());
        })?;
        Ok(Self { news, ended })
    }

    pub(crate) fn tell(&self, news: News) {
        // The thread receives until the channel is closed in `end`, so sending does not fail.
        let _ = self.news.send(news);
    }

    pub(crate) fn end(self) {
        drop(self.news);
        let _ = self.ended.recv_timeout(LAST_WORD);
    }
}

fn notify(manager: &UnixDatagram, news: &News) -> io::Result<()> {
    let states = match news {
        News::Ready(status) => vec![NotifyState::Ready, NotifyState::Status(status)],
        News::Reloading => vec![NotifyState::Reloading, NotifyState::monotonic_usec_now()?],
        News::Stopping => vec![NotifyState::Stopping],
    };
    let lines: String = states.iter().map(|state| format!("{state}\n")).collect();
    manager.send(lines.as_bytes()).map(drop)
}

/// Returns a socket that is connected to the service manager that started this process (`$NOTIFY_SOCKET`), if there
/// is one.
pub(crate) fn manager() -> Option<UnixDatagram> {
    let place = std::env::var_os("NOTIFY_SOCKET")?;
    let address = match place.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&place),
    };
    let connected = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        Ok(socket)
    });
    connected
        .inspect_err(|error| tracing::warn!("$NOTIFY_SOCKET: {error}"))
        .ok()
}
