//! Authentication: over TCP a client must present the token. A request that names the host by a name that another
//! site may have chosen (DNS rebinding) is refused.

use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hyper::header::{AUTHORIZATION, COOKIE, HOST, HeaderMap};
use larder_block::small_file;
use ring::hmac;

use crate::listen::is_loopback;

/// Shortest token, in bytes; it is long because attempts are not limited.
const TOKEN_BYTES_MIN: usize = 16;

/// Longest token, in bytes.
const TOKEN_BYTES_MAX: u64 = 4096;

/// First part of the cookie's name. The second part depends on the token, so that a browser that reaches several
/// hosts by one name, as through `ssh -L`, keeps a cookie for each.
const COOKIE_NAME: &str = "larder-host-";

/// Text whose signature is the second part of the cookie's name, and the number of characters of the signature that
/// are used.
const COOKIE_NAME_SUBJECT: &[u8] = b"larder host: the name of the cookie";
const COOKIE_NAME_CHARACTERS: usize = 8;

/// Text whose signature is the cookie's value.
const COOKIE_SUBJECT: &[u8] = b"larder host: a browser whose user has shown the token";

/// Reason why there is no token.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TokenError {
    #[error("{}: {source}{}", path.display(), hint(source))]
    Read { path: PathBuf, source: io::Error },
    #[error("{} can be read by every user of this host (mode {mode:04o}); remove that right with chmod o=", path.display())]
    WorldReadable { path: PathBuf, mode: u32 },
    #[error(
        "{} has no token of {TOKEN_BYTES_MIN} printable characters or more; create one with `openssl rand -hex 32`",
        path.display()
    )]
    Weak { path: PathBuf },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; the user that runs `larder host` must be able to read it, which for the service is larder-host (chown larder-host)"
        }
        _ => "",
    }
}

/// Shared secret that clients must present.
pub struct Token {
    key: hmac::Key,
    cookie_name: String,
    cookie: String,
}

impl Token {
    /// Reads the first line of a file.
    ///
    /// # Errors
    /// See [`TokenError`].
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let failed = |source| TokenError::Read { path: path.to_owned(), source };
        let file = small_file::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.mode() & 0o777;
        if mode & 0o007 != 0 {
            return Err(TokenError::WorldReadable { path: path.to_owned(), mode });
        }
        let mut text = Vec::new();
        file.take(TOKEN_BYTES_MAX).read_to_end(&mut text).map_err(failed)?;
        let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
        match line.len() >= TOKEN_BYTES_MIN && line.iter().all(u8::is_ascii_graphic) {
            true => Ok(Self::new(line)),
            false => Err(TokenError::Weak { path: path.to_owned() }),
        }
    }

    fn new(secret: &[u8]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        // The signature authenticates like the token, does not reveal it, and becomes invalid when the token changes.
        let signed = |subject| -> String {
            let signature = hmac::sign(&key, subject);
            signature.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let mut cookie_name = signed(COOKIE_NAME_SUBJECT);
        cookie_name.truncate(COOKIE_NAME_CHARACTERS);
        Self { cookie: signed(COOKIE_SUBJECT), cookie_name: format!("{COOKIE_NAME}{cookie_name}"), key }
    }

    /// Returns whether `candidate` is the token, in constant time.
    pub(crate) fn matches(&self, candidate: &[u8]) -> bool {
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, candidate), COOKIE_SUBJECT);
        hmac::verify(&self.key, COOKIE_SUBJECT, signature.as_ref()).is_ok()
    }

    /// Returns the `Set-Cookie` value for a browser that has presented the token.
    pub(crate) fn cookie(&self, is_over_tls: bool) -> String {
        let secure = if is_over_tls { "; Secure" } else { "" };
        format!("{}={}; Path=/; HttpOnly; SameSite=Strict{secure}", self.cookie_name, self.cookie)
    }

    /// Returns whether a request carries the token or a valid cookie.
    pub(crate) fn authorizes(&self, headers: &HeaderMap) -> bool {
        let text = |name| headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
        let mut bearers = text(AUTHORIZATION).filter_map(|value| {
            let (scheme, candidate) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| candidate.trim())
        });
        let cookies = text(COOKIE).flat_map(|value| value.split(';'));
        let mut token_cookies =
            cookies.filter_map(|cookie| cookie.trim().strip_prefix(self.cookie_name.as_str())?.strip_prefix('='));
        bearers.any(|candidate| self.matches(candidate.as_bytes()))
            || token_cookies.any(|cookie| self.verifies_cookie(cookie))
    }

    fn verifies_cookie(&self, cookie: &str) -> bool {
        let byte = |at: usize| u8::from_str_radix(cookie.get(at..at + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..cookie.len().min(128)).step_by(2).map(byte).collect();
        bytes.is_some_and(|bytes| hmac::verify(&self.key, COOKIE_SUBJECT, &bytes).is_ok())
    }
}

/// Returns whether a request names this host in a way that no other site can: as `localhost`, by a loopback address,
/// or by the address that is listened on.
pub(crate) fn is_local_host_name(headers: &HeaderMap, listen: Option<IpAddr>) -> bool {
    let mut all = headers.get_all(HOST).iter();
    let (Some(host), None) = (all.next(), all.next()) else {
        return false;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    let name = match host.strip_prefix('[').and_then(|bracketed| bracketed.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or_default(),
    };
    let address = name.parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost")
        || address.is_ok_and(|address| is_loopback(address) || Some(address) == listen)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
        let all = all
            .iter()
            .map(|(name, value)| (hyper::header::HeaderName::from_static(name), value.parse().expect("a value")));
        all.collect()
    }

    /// The token and a cookie made from it are accepted; anything else is not.
    #[test]
    fn token_and_its_cookie_authenticate() {
        let token = Token::new(b"0123456789abcdef");
        let cookie = token.cookie(true);
        let cookie = cookie.split(';').next().expect("a cookie");
        let (name, _) = cookie.split_once('=').expect("a name");
        let other = Token::new(b"fedcba9876543210");
        for (lets_in, all) in [
            (true, headers(&[("authorization", "Bearer 0123456789abcdef")])),
            (true, headers(&[("authorization", "bearer  0123456789abcdef")])),
            (true, headers(&[("cookie", &format!("a=b; {cookie}"))])),
            (false, headers(&[])),
            (false, headers(&[("authorization", "Bearer 0123456789abcde")])),
            (false, headers(&[("authorization", "Basic 0123456789abcdef")])),
            (false, headers(&[("cookie", &format!("{name}="))])),
            (false, headers(&[("cookie", &format!("{name}=é"))])),
            (false, headers(&[("cookie", other.cookie(true).split(';').next().expect("a cookie"))])),
        ] {
            assert_eq!(token.authorizes(&all), lets_in, "{all:?}");
        }
    }

    /// A token that is short, or readable by every user, is refused.
    #[test]
    fn unsafe_token_is_refused() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("token");
        let read = |text: &str, mode: u32| {
            std::fs::write(&path, text).expect("writes");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("ours");
            Token::read(&path)
        };
        assert!(read("0123456789abcdef\n", 0o640).is_ok_and(|token| token.matches(b"0123456789abcdef")));
        assert!(matches!(read("0123456789abcdef\n", 0o644), Err(TokenError::WorldReadable { mode: 0o644, .. })));
        for weak in ["", "\n0123456789abcdef", "short", "0123456789 abcdef"] {
            assert!(matches!(read(weak, 0o600), Err(TokenError::Weak { .. })), "{weak}");
        }
    }

    #[test]
    fn only_own_host_names_are_accepted() {
        let listen = Some("192.0.2.7".parse().expect("an address"));
        for (is_local, host) in [
            (true, "localhost:9178"),
            (true, "LOCALHOST"),
            (true, "127.0.0.1:1"),
            (true, "[::1]:9178"),
            (true, "192.0.2.7:9178"),
            (false, "192.0.2.8"),
            (false, "localhost.evil.example"),
            (false, "evil.example:9178"),
            (false, ""),
        ] {
            assert_eq!(is_local_host_name(&headers(&[("host", host)]), listen), is_local, "{host}");
        }
        assert!(!is_local_host_name(&headers(&[]), listen));
        assert!(!is_local_host_name(&headers(&[("host", "localhost"), ("host", "localhost")]), listen));
    }
}
