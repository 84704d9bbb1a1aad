//! NBD URIs (the NBD project's `doc/uri.md`): `nbd://HOST[:PORT]/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`, and
//! `nbds` in place of `nbd` for TLS. QEMU's older names are parsed as well: `nbd:HOST:PORT[:exportname=EXPORT]` and
//! `nbd:unix:PATH[:exportname=EXPORT]`, without percent-encoding.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use super::PORT;
use crate::event_loop::SocketAddress;

/// The address of an export, and the options of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdUri {
    /// The address of the socket.
    pub address: SocketAddress,
    /// The export's name; empty for the server's default one.
    pub export: String,
    /// TLS options if TLS is required; `None` for an unencrypted connection.
    pub tls: Option<NbdTlsOptions>,
}

/// The TLS options of a URI.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdTlsOptions {
    /// The directory of `ca-cert.pem` and, to present a client certificate, of `client-cert.pem` and `client-key.pem`
    /// (`tls-certificates=`).
    pub certificates: Option<PathBuf>,
    /// The name that the server's certificate must have, if it is not the host's name (`tls-hostname=`).
    pub hostname: Option<String>,
}

/// The reason why a text is not an NBD URI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum NbdUriError {
    #[error("'{uri}': an address of this form needs a port, as in nbd:HOST:{PORT}:exportname=EXPORT")]
    NoPort { uri: String },
    #[error("'{uri}' does not begin with nbd://, nbds://, nbd+unix:// or nbds+unix://")]
    Scheme { uri: String },
    #[error("'{uri}': a unix socket needs ?socket=PATH, as in nbd+unix:///EXPORT?socket=/run/nbd.sock")]
    NoSocket { uri: String },
    #[error(
        "'{uri}': '{host}' is for TCP; a unix socket's URI has three slashes, as in nbd+unix:///EXPORT?socket=PATH"
    )]
    HostWithUnix { uri: String, host: String },
    #[error("'{uri}' names no host, as in nbd://HOST/EXPORT")]
    NoHost { uri: String },
    #[error("'{uri}': '{port}' is not a port, a number from 1 to 65535")]
    Port { uri: String, port: String },
    #[error("'{uri}': the address after '[' has no ']', as in nbd://[::1]/EXPORT")]
    Bracket { uri: String },
    #[error("'{uri}': NBD with certificates has no user names; omit '{user}@'")]
    User { uri: String, user: String },
    #[error("'{uri}' has a '%' that is not followed by two hexadecimal digits, or does not decode to UTF-8")]
    Percent { uri: String },
    #[error("'{uri}': '{key}' is not known; the known keys are socket, tls-certificates and tls-hostname")]
    UnknownKey { uri: String, key: String },
    #[error("'{uri}': '{key}' is valid only with {scheme}")]
    KeyOfOtherScheme { uri: String, key: &'static str, scheme: &'static str },
    #[error("'{uri}': an NBD URI has no part after '#'; write %23 for a '#' in a name")]
    Fragment { uri: String },
    #[error("'{uri}': an export's name has at most 4096 bytes")]
    LongName { uri: String },
    #[error("'{uri}' has a NUL (%00) in it; no name, path or value of NBD has one")]
    Nul { uri: String },
}

impl FromStr for NbdUri {
    type Err = NbdUriError;

    fn from_str(uri: &str) -> Result<Self, NbdUriError> {
        let text = uri.to_owned();
        let schemes = [
            ("nbd+unix://", true, false),
            ("nbds+unix://", true, true),
            ("nbd://", false, false),
            ("nbds://", false, true),
        ];
        let Some((rest, unix, tls)) =
            schemes.iter().find_map(|(prefix, unix, tls)| Some((strip_prefix(uri, prefix)?, *unix, *tls)))
        else {
            return match strip_prefix(uri, "nbd:") {
                Some(rest) => parse_legacy(uri, rest),
                None => Err(NbdUriError::Scheme { uri: text }),
            };
        };
        if rest.contains('#') {
            return Err(NbdUriError::Fragment { uri: text });
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let query = Query::parse(uri, query)?;
        let address = if unix {
            unix_address(uri, authority, query.socket)?
        } else {
            if query.socket.is_some() {
                return Err(NbdUriError::KeyOfOtherScheme {
                    uri: text,
                    key: "socket",
                    scheme: "nbd+unix or nbds+unix",
                });
            }
            tcp_address(uri, authority)?
        };
        let key = match (&query.certificates, &query.hostname) {
            (Some(_), _) => Some("tls-certificates"),
            (None, Some(_)) => Some("tls-hostname"),
            (None, None) => None,
        };
        if let (false, Some(key)) = (tls, key) {
            return Err(NbdUriError::KeyOfOtherScheme { uri: text, key, scheme: "nbds or nbds+unix" });
        }
        Ok(Self {
            address,
            export: export_name(uri, decode(uri, path)?)?,
            tls: tls.then_some(NbdTlsOptions {
                certificates: query.certificates.map(PathBuf::from),
                hostname: query.hostname,
            }),
        })
    }
}

/// Parses the part after `nbd:` of QEMU's older names. The export's name begins after the first `:exportname=`.
fn parse_legacy(uri: &str, rest: &str) -> Result<NbdUri, NbdUriError> {
    let (server, export) = rest.split_once(":exportname=").unwrap_or((rest, ""));
    let address = match server.strip_prefix("unix:") {
        Some(path) => unix_address(uri, "", Some(path.to_owned()))?,
        None => match host_and_port(uri, server)? {
            (_, "") => return Err(NbdUriError::NoPort { uri: uri.to_owned() }),
            (host, port) => SocketAddress::Tcp { host: host.to_owned(), port: port_number(uri, port)? },
        },
    };
    Ok(NbdUri { address, export: export_name(uri, export.to_owned())?, tls: None })
}

fn export_name(uri: &str, name: String) -> Result<String, NbdUriError> {
    match name.len() > super::STRING_LEN_MAX {
        true => Err(NbdUriError::LongName { uri: uri.to_owned() }),
        false => Ok(name),
    }
}

#[derive(Default)]
struct Query {
    socket: Option<String>,
    certificates: Option<String>,
    hostname: Option<String>,
}

impl Query {
    fn parse(uri: &str, query: &str) -> Result<Self, NbdUriError> {
        let mut found = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = Some(decode(uri, value)?);
            match key {
                "socket" => found.socket = value,
                "tls-certificates" => found.certificates = value,
                "tls-hostname" => found.hostname = value,
                key => {
                    return Err(NbdUriError::UnknownKey { uri: uri.to_owned(), key: key.to_owned() });
                }
            }
        }
        Ok(found)
    }
}

fn unix_address(uri: &str, authority: &str, socket: Option<String>) -> Result<SocketAddress, NbdUriError> {
    if !authority.is_empty() {
        return Err(NbdUriError::HostWithUnix { uri: uri.to_owned(), host: authority.to_owned() });
    }
    match socket {
        Some(path) if !path.is_empty() => Ok(SocketAddress::Unix(path.into())),
        _ => Err(NbdUriError::NoSocket { uri: uri.to_owned() }),
    }
}

fn tcp_address(uri: &str, authority: &str) -> Result<SocketAddress, NbdUriError> {
    if let Some((user, _)) = authority.split_once('@') {
        return Err(NbdUriError::User { uri: uri.to_owned(), user: user.to_owned() });
    }
    let (host, port) = host_and_port(uri, authority)?;
    Ok(SocketAddress::Tcp {
        host: decode(uri, host)?,
        port: match port {
            "" => PORT,
            port => port_number(uri, port)?,
        },
    })
}

/// Splits `HOST:PORT`; an IPv6 address is in brackets, and the port may be omitted.
fn host_and_port<'a>(uri: &str, authority: &'a str) -> Result<(&'a str, &'a str), NbdUriError> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(|| NbdUriError::Bracket { uri: uri.to_owned() })?;
            (host, rest.strip_prefix(':').unwrap_or(rest))
        }
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    match host {
        "" => Err(NbdUriError::NoHost { uri: uri.to_owned() }),
        host => Ok((host, port)),
    }
}

fn port_number(uri: &str, port: &str) -> Result<u16, NbdUriError> {
    let number = port.parse().ok().filter(|port| *port != 0);
    number.ok_or_else(|| NbdUriError::Port { uri: uri.to_owned(), port: port.to_owned() })
}

/// Strips a prefix without regard to case, as schemes are case-insensitive.
fn strip_prefix<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (start, rest) = text.split_at_checked(prefix.len())?;
    start.eq_ignore_ascii_case(prefix).then_some(rest)
}

fn decode(uri: &str, text: &str) -> Result<String, NbdUriError> {
    let malformed = || NbdUriError::Percent { uri: uri.to_owned() };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
        match (digit(), digit()) {
            (Some(high), Some(low)) => bytes.push((high * 16 + low) as u8),
            _ => return Err(malformed()),
        }
    }
    if bytes.contains(&0) {
        return Err(NbdUriError::Nul { uri: uri.to_owned() });
    }
    String::from_utf8(bytes).map_err(|_| malformed())
}

/// Writes `text` with all characters percent-encoded that may have a meaning in a URI, except `plain`: slashes have
/// none in an export's name, nor colons in an address in brackets.
fn encode(f: &mut fmt::Formatter<'_>, text: &str, plain: u8) -> fmt::Result {
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => write!(f, "{}", char::from(byte))?,
            byte if byte == plain => write!(f, "{}", char::from(byte))?,
            byte => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

/// Formats the URI in its shortest form.
impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let secure = if self.tls.is_some() { "s" } else { "" };
        let mut separator = '?';
        match &self.address {
            SocketAddress::Unix(path) => {
                write!(f, "nbd{secure}+unix:///")?;
                encode(f, &self.export, b'/')?;
                write!(f, "?socket=")?;
                encode(f, &path.to_string_lossy(), b'/')?;
                separator = '&';
            }
            SocketAddress::Tcp { host, port } => {
                let (open, close) = if host.contains(':') { ("[", "]") } else { ("", "") };
                write!(f, "nbd{secure}://{open}")?;
                // An IPv6 address may name its interface after a '%'.
                encode(f, host, b':')?;
                write!(f, "{close}")?;
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                write!(f, "/")?;
                encode(f, &self.export, b'/')?;
            }
        }
        let tls = self.tls.clone().unwrap_or_default();
        if let Some(directory) = tls.certificates {
            write!(f, "{separator}tls-certificates=")?;
            encode(f, &directory.to_string_lossy(), b'/')?;
            separator = '&';
        }
        if let Some(name) = tls.hostname {
            write!(f, "{separator}tls-hostname=")?;
            encode(f, &name, b'/')?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp(host: &str, port: u16) -> SocketAddress {
        SocketAddress::Tcp { host: host.to_owned(), port }
    }

    #[test]
    fn uri_gives_address_and_export() {
        for (text, address, export) in [
            ("nbd://example.org", tcp("example.org", 10809), ""),
            ("nbd://example.org/", tcp("example.org", 10809), ""),
            ("NBD://example.org:99/disk", tcp("example.org", 99), "disk"),
            ("nbd://[::1]/a/b", tcp("::1", 10809), "a/b"),
            ("nbd://[fe80::1]:7/x%20y", tcp("fe80::1", 7), "x y"),
            ("nbd+unix:///?socket=/run/nbd%2Bx.sock", SocketAddress::Unix("/run/nbd+x.sock".into()), ""),
            ("nbd+unix:///disk?socket=s", SocketAddress::Unix("s".into()), "disk"),
            ("nbd:example.org:99", tcp("example.org", 99), ""),
            ("nbd:[fe80::1%eth0]:7:exportname=x%20y", tcp("fe80::1%eth0", 7), "x%20y"),
            ("nbd:a/b?c#d@e f:7", tcp("a/b?c#d@e f", 7), ""),
            ("nbd://a%2Fb%3Fc/x", tcp("a/b?c", 10809), "x"),
            ("nbd:unix:/run/a:b", SocketAddress::Unix("/run/a:b".into()), ""),
            ("nbd:unix:/run/n:exportname=a:exportname=b", SocketAddress::Unix("/run/n".into()), "a:exportname=b"),
        ] {
            let uri: NbdUri = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((&uri.address, uri.export.as_str()), (&address, export));
            assert_eq!(uri.tls, None);
            assert_eq!(uri.to_string().parse(), Ok(uri));
        }
    }

    #[test]
    fn tls_uri_gives_certificates_and_hostname() {
        let uri: NbdUri = "nbds://h/e?tls-certificates=/etc/pki%20x&tls-hostname=other".parse().expect("is a URI");
        let tls = uri.tls.expect("has TLS");
        assert_eq!(tls.certificates, Some("/etc/pki x".into()));
        assert_eq!(tls.hostname.as_deref(), Some("other"));
    }

    #[test]
    fn invalid_uri_is_refused_with_reason() {
        for (text, part) in [
            ("http://x", "does not begin with nbd://"),
            ("nbd:///x", "names no host"),
            ("nbd://h:0/x", "'0' is not a port"),
            ("nbd://h:x/", "'x' is not a port"),
            ("nbd://[::1/x", "has no ']'"),
            ("nbd://[::1]x/", "'x' is not a port"),
            ("nbd://me@h/x", "'me@'"),
            ("nbd://h/x#y", "'#'"),
            ("nbd://h/%zz", "two hexadecimal digits"),
            ("nbd://h/%ff", "UTF-8"),
            ("nbd://h/x?tls-psk-file=y", "'tls-psk-file' is not known"),
            ("nbd://h/x?socket=y", "'socket' is valid only with nbd+unix"),
            ("nbd://h/x?tls-hostname=y", "'tls-hostname' is valid only with nbds"),
            ("nbd:h", "needs a port"),
            ("nbd:", "names no host"),
            ("nbd::10809", "names no host"),
            ("nbd:::1:10809", "names no host"),
            ("nbd:h:10809,ipv4", "'10809,ipv4' is not a port"),
            ("nbd:unix:", "needs ?socket=PATH"),
            ("nbd:unix::exportname=x", "needs ?socket=PATH"),
            ("nbd+unix:///x", "needs ?socket=PATH"),
            ("nbd://h/x%00y", "has a NUL (%00)"),
            ("nbd+unix:///x?socket=/s%00", "has a NUL (%00)"),
            ("nbd+unix://h/x?socket=y", "three slashes"),
        ] {
            let error = text.parse::<NbdUri>().expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
            assert!(error.contains(text), "{error}");
        }
    }

    proptest! {
        #[test]
        fn printed_uri_parses_to_the_same(
            host in "[^\0]{1,8}", port in 1u16.., export in "[^\0]{0,12}", socket in "[ -~]{1,12}",
            unix: bool, secure: bool, name in prop::option::of("[ -~]{1,8}"),
        ) {
            let uri = NbdUri {
                address: if unix { SocketAddress::Unix(socket.into()) } else { tcp(&host, port) },
                export,
                tls: secure.then_some(NbdTlsOptions { certificates: name.clone().map(PathBuf::from), hostname: name }),
            };
            prop_assert_eq!(uri.to_string().parse::<NbdUri>(), Ok(uri));
        }

        #[test]
        fn garbage_never_panics(text in ".{0,40}") {
            let _ = text.parse::<NbdUri>();
            let _ = format!("nbd://{text}").parse::<NbdUri>();
            let _ = format!("nbd:{text}").parse::<NbdUri>();
            let _ = format!("nbd+unix:///{text}").parse::<NbdUri>();
        }
    }
}
