//! The hosts that a sender and a receiver accept: those of `--peer`, or those that were remembered.

use std::path::{Path, PathBuf};

use anyhow::Context;
use larder_migrate::tls::{PeerError, PeerRecords, Peers};
use larder_vm::known_hosts::known_hosts_directory;

use crate::cli::migrate::TrustArguments;

/// Returns the directory of remembered hosts, for the user that this process is or becomes; `None` if it is not
/// needed.
pub(super) fn peer_directory(trust: &TrustArguments, user: Option<&str>) -> anyhow::Result<Option<PathBuf>> {
    if trust.tls.is_none() {
        return Ok(None);
    }
    match known_hosts_directory(user) {
        Ok(directory) => Ok(Some(directory)),
        Err(error) if !trust.peer.is_empty() => {
            tracing::warn!("the hosts that --peer names are not remembered: {error}");
            Ok(None)
        }
        Err(error) => Err(error).context(
            "the other host's certificate cannot be remembered; name it with --peer, or set $STATE_DIRECTORY to a directory of \
             this user",
        ),
    }
}

/// Returns the accepted hosts, with the records that `open` opens in the directory.
pub(super) fn accepted_peers(
    trust: &TrustArguments,
    directory: Option<&Path>,
    open: impl FnOnce(&Path) -> Result<PeerRecords, PeerError>,
) -> anyhow::Result<Peers> {
    let given = trust.peer.clone();
    let records = match directory.map(open).transpose() {
        Ok(records) => records,
        Err(error) if !given.is_empty() => {
            tracing::warn!("the hosts that --peer names are not remembered: {error}");
            None
        }
        Err(error) => return Err(error.into()),
    };
    Ok(Peers { allowed: given, records })
}
