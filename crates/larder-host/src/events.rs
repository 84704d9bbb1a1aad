//! Subscription to the events of a VM's server, on behalf of a browser.

use std::path::Path;
use std::time::Duration;

use http_body_util::BodyExt;
use larder_vm::control::events::Event;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::control_client::{ControlConnection, ControlRequestError};

/// Longest line of an event stream, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

/// Pause before the next attempt when there is no server, or when its stream ends.
const RECONNECT_DELAY: Duration = Duration::from_secs(2);

/// Forwards all events of whichever server listens on the socket `path` to `events`, until it is dropped.
pub(crate) async fn forward_events(path: &Path, events: &mpsc::Sender<Event>) {
    let mut last = None;
    while !events.is_closed() {
        // Errors are ignored: the state of the VM is reported elsewhere.
        let _ = forward_stream(path, &mut last, events).await;
        sleep(RECONNECT_DELAY).await;
    }
}

/// Forwards the events of one server until its stream ends.
async fn forward_stream(
    path: &Path,
    last: &mut Option<String>,
    events: &mpsc::Sender<Event>,
) -> Result<(), ControlRequestError> {
    let mut connection = ControlConnection::open(path).await?;
    let response = connection.get("/v1/events", last.as_deref()).await?;
    if !response.status().is_success() {
        return Ok(());
    }
    let mut body = response.into_body();
    let mut lines = LineSplitter::default();
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame?.into_data() else { continue };
        for line in lines.add(&bytes)? {
            if let Some(id) = line.strip_prefix("id: ") {
                *last = Some(id.to_owned());
            }
            let event = line.strip_prefix("data: ").and_then(|data| serde_json::from_str(data).ok());
            if let Some(event) = event
                && events.send(event).await.is_err()
            {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Splitter of a byte stream into lines.
#[derive(Default)]
struct LineSplitter(Vec<u8>);

impl LineSplitter {
    /// Adds bytes, and returns the lines that are now complete.
    fn add(&mut self, bytes: &[u8]) -> Result<Vec<String>, ControlRequestError> {
        self.0.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(line.trim_ascii_end()).into_owned());
        }
        match self.0.len() > LINE_BYTES_MAX {
            true => Err(ControlRequestError::NotLarder("an unterminated line".to_owned())),
            false => Ok(lines),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_and_bounded() {
        let mut lines = LineSplitter::default();
        assert_eq!(lines.add(b"id: 1\r\nda").expect("short"), ["id: 1"]);
        assert_eq!(lines.add(b"ta: x\n\ny").expect("short"), ["data: x", ""]);
        assert!(lines.add(&vec![b'z'; LINE_BYTES_MAX]).is_err());
    }
}
