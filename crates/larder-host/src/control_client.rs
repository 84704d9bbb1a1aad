//! HTTP client of control sockets.

use std::io;
use std::path::Path;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use larder_vm::control::closed_by_peer;
use larder_vm::read_group::READ_GROUP;
use tokio::net::UnixStream;
use tokio::task::AbortHandle;

/// Longest response, in bytes.
const RESPONSE_BYTES_MAX: usize = 4 << 20;

/// Reason why a control socket gives no response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlRequestError {
    #[error("the socket no longer exists")]
    NoSocket,
    #[error("no process listens on the socket: its server was killed")]
    Killed,
    #[error(
        "you may not connect to it: only the user who runs the server, root, and members of the group {READ_GROUP} can"
    )]
    Denied,
    #[error("its queue of connections is full")]
    Full,
    #[error("the connection was closed without an answer")]
    HungUp,
    #[error("it is not a Larder control socket: {0}")]
    NotLarder(String),
    #[error("cannot query it: {0}")]
    Os(io::Error),
}

impl From<io::Error> for ControlRequestError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::NoSocket,
            io::ErrorKind::ConnectionRefused => Self::Killed,
            io::ErrorKind::PermissionDenied => Self::Denied,
            io::ErrorKind::WouldBlock => Self::Full,
            _ => Self::Os(error),
        }
    }
}

impl From<hyper::Error> for ControlRequestError {
    fn from(error: hyper::Error) -> Self {
        match closed_by_peer(&error) {
            true => Self::HungUp,
            false => Self::NotLarder(error.to_string()),
        }
    }
}

/// Connection for one request; dropping it closes it.
pub(crate) struct ControlConnection {
    sender: http1::SendRequest<Full<Bytes>>,
    /// Process that called `listen` on the socket.
    pub(crate) listener: Option<i32>,
    driver: AbortHandle,
}

impl ControlConnection {
    pub(crate) async fn open(path: &Path) -> Result<Self, ControlRequestError> {
        let stream = UnixStream::connect(path).await?;
        let listener = stream.peer_cred().ok().and_then(|peer| peer.pid());
        let (sender, connection) = http1::Builder::new().handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection).abort_handle();
        Ok(Self { sender, listener, driver })
    }

    /// Sends `GET resource` and returns the response head; the body can be read while the connection lives.
    pub(crate) async fn get(
        &mut self,
        resource: &str,
        last_event: Option<&str>,
    ) -> Result<Response<Incoming>, ControlRequestError> {
        let mut request = Request::get(resource).header(HOST, "localhost");
        if let Some(last) = last_event {
            request = request.header("last-event-id", last);
        }
        let request =
            request.body(Full::default()).map_err(|error| ControlRequestError::NotLarder(error.to_string()))?;
        Ok(self.sender.send_request(request).await?)
    }

    /// Sends `PATCH resource` with a JSON body and returns the response head.
    async fn patch(&mut self, resource: &str, body: String) -> Result<Response<Incoming>, ControlRequestError> {
        let request = Request::patch(resource)
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::from(body))
            .map_err(|error| ControlRequestError::NotLarder(error.to_string()))?;
        Ok(self.sender.send_request(request).await?)
    }
}

impl Drop for ControlConnection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Response of a control socket, with its whole body.
pub(crate) struct ControlResponse {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
    pub(crate) listener: Option<i32>,
}

pub(crate) async fn get_resource(path: &Path, resource: &str) -> Result<ControlResponse, ControlRequestError> {
    let mut connection = ControlConnection::open(path).await?;
    let response = connection.get(resource, None).await?;
    read_response(response, &connection).await
}

/// Sends `PATCH resource` to the control socket at `path`.
pub(crate) async fn patch_resource(
    path: &Path,
    resource: &str,
    body: String,
) -> Result<ControlResponse, ControlRequestError> {
    let mut connection = ControlConnection::open(path).await?;
    let response = connection.patch(resource, body).await?;
    read_response(response, &connection).await
}

async fn read_response(
    response: Response<Incoming>,
    connection: &ControlConnection,
) -> Result<ControlResponse, ControlRequestError> {
    let status = response.status();
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    let body = body.map_err(|error| match error.downcast::<hyper::Error>() {
        Ok(error) => ControlRequestError::from(*error),
        Err(error) => ControlRequestError::NotLarder(error.to_string()),
    })?;
    Ok(ControlResponse { status, body: body.to_bytes(), listener: connection.listener })
}
