//! Notifications to the service manager (`$NOTIFY_SOCKET`, sd_notify(3)).

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use sd_notify::NotifyState;

/// Maximum time to deliver the last notification.
const FINAL_NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(1);

/// State that is reported to the service manager.
pub(crate) enum ServiceState {
    /// The service works; the text becomes its status.
    Ready(String),
    /// The service rereads its configuration; [`ServiceState::Ready`] follows.
    Reloading,
    /// The service is stopping.
    Stopping,
}

/// Sender of notifications. A separate thread sends them, so that a stalled service manager cannot block the service.
pub(crate) struct Notifier {
    queue: Sender<ServiceState>,
    ended: Receiver<()>,
}

impl Notifier {
    /// Connects to the service manager, if there is one. A process that will be confined must do that before, because
    /// it cannot create sockets afterwards.
    pub(crate) fn new() -> io::Result<Self> {
        let manager = connect_manager();
        let (news, notifications) = mpsc::channel();
        let (end, ended) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("larder-notify".to_owned());
        thread.spawn(move || {
            for news in notifications {
                if let Some(manager) = &manager
                    && let Err(error) = send_notification(manager, &news)
                {
                    tracing::warn!("$NOTIFY_SOCKET: {error}");
                }
            }
            let _ = end.send(());
        })?;
        Ok(Self { queue: news, ended })
    }

    pub(crate) fn notify(&self, news: ServiceState) {
        // The thread receives until the channel is closed in `end`, so sending does not fail.
        let _ = self.queue.send(news);
    }

    pub(crate) fn finish(self) {
        drop(self.queue);
        let _ = self.ended.recv_timeout(FINAL_NOTIFICATION_TIMEOUT);
    }
}

fn send_notification(manager: &UnixDatagram, news: &ServiceState) -> io::Result<()> {
    let states = match news {
        ServiceState::Ready(status) => vec![NotifyState::Ready, NotifyState::Status(status)],
        ServiceState::Reloading => vec![NotifyState::Reloading, NotifyState::monotonic_usec_now()?],
        ServiceState::Stopping => vec![NotifyState::Stopping],
    };
    let lines: String = states.iter().map(|state| format!("{state}\n")).collect();
    manager.send(lines.as_bytes()).map(drop)
}

/// Returns a socket that is connected to the service manager that started this process (`$NOTIFY_SOCKET`), if there
/// is one.
pub(crate) fn connect_manager() -> Option<UnixDatagram> {
    let path = std::env::var_os("NOTIFY_SOCKET")?;
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&path),
    };
    let connected = address.and_then(|address| {
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        Ok(socket)
    });
    connected.inspect_err(|error| tracing::warn!("$NOTIFY_SOCKET: {error}")).ok()
}
