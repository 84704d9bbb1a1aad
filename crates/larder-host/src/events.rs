//! What a VM's server tells of what happens there, followed for a browser.

use std::path::Path;
use std::time::Duration;

use http_body_util::BodyExt;
use larder_vm::control::events::Event;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::ask::{AskError, Connection};

/// The longest line of an event, in bytes.
const LINE_BYTES_MAX: usize = 64 << 10;

/// From one try to the next where there is no server, or it tells nothing.
const PAUSE: Duration = Duration::from_secs(2);

/// Tells `events` of all that happens at the server on the socket `path`, whichever server that is; dropped to end.
pub(crate) async fn follow(path: &Path, events: &mpsc::Sender<Event>) {
    let mut last = None;
    while !events.is_closed() {
        // It is told where its VM is what is the matter.
        let _ = follow_one(path, &mut last, events).await;
        sleep(PAUSE).await;
    }
}

/// Follows one server until it ends.
async fn follow_one(path: &Path, last: &mut Option<String>, events: &mpsc::Sender<Event>) -> Result<(), AskError> {
    let mut connection = Connection::open(path).await?;
    let response = connection.get("/v1/events", last.as_deref()).await?;
    if !response.status().is_success() {
        return Ok(());
    }
    let mut body = response.into_body();
    let mut lines = Lines::default();
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame?.into_data() else { continue };
        for line in lines.add(&bytes)? {
            if let Some(id) = line.strip_prefix("id: ") {
                *last = Some(id.to_owned());
            }
            let event = line
                .strip_prefix("data: ")
                .and_then(|data| serde_json::from_str(data).ok());
            if let Some(event) = event
                && events.send(event).await.is_err()
            {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Lines of what comes in pieces.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    /// The lines that are whole now.
    fn add(&mut self, bytes: &[u8]) -> Result<Vec<String>, AskError> {
        self.0.extend_from_slice(bytes);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(line.trim_ascii_end()).into_owned());
        }
        match self.0.len() > LINE_BYTES_MAX {
            true => Err(AskError::Foreign("a line without an end".to_owned())),
            false => Ok(lines),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_put_together_and_have_an_end() {
        let mut lines = Lines::default();
        assert_eq!(lines.add(b"id: 1\r\nda").expect("short"), ["id: 1"]);
        assert_eq!(lines.add(b"ta: x\n\ny").expect("short"), ["data: x", ""]);
        assert!(lines.add(&vec![b'z'; LINE_BYTES_MAX]).is_err());
    }
}
