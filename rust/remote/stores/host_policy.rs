//! Hosts that requests may reach.
//!
//! Services of instance metadata hand out credentials to everything that runs on a machine, so neither URLs nor answers of
//! servers may lead there. The addresses that a connection goes to are checked, as the lookup of its host's name returned
//! them: a name may have another address each time.

use super::addresses;
use super::http_error::{HttpResult, refused};
use object_store::client::HttpError;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use tokio::net::lookup_host;

/// Addresses of services of instance metadata.
const METADATA_V4: [Ipv4Addr; 6] = [
    Ipv4Addr::new(169, 254, 169, 254),
    // Containers of ECS and EKS.
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    // Azure, Alibaba and Oracle.
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];
const METADATA_V6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23),
    // Google.
    Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254),
];
/// Name of a service of instance metadata, which a proxy would resolve.
const METADATA_NAME: &str = "metadata.google.internal";

/// Hosts that a request may reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPolicy {
    /// All: the program or its environment names the host.
    #[default]
    Configured,
    /// All but services of instance metadata: a URL names the host.
    Named,
    /// Neither services of instance metadata nor link-local addresses: the answer of a server names the host.
    Redirected,
}

impl HostPolicy {
    fn allows(self, address: IpAddr) -> bool {
        let (is_metadata, is_link_local) = match address.to_canonical() {
            IpAddr::V4(address) => (METADATA_V4.contains(&address), address.is_link_local()),
            IpAddr::V6(address) => (METADATA_V6.contains(&address), address.is_unicast_link_local()),
        };
        match self {
            HostPolicy::Configured => true,
            HostPolicy::Named => !is_metadata,
            HostPolicy::Redirected => !is_metadata && !is_link_local,
        }
    }

    /// Checks a host of a URL that is an address, for which no name is looked up. The error is the refusal of the
    /// address.
    pub fn check(self, host: &str) -> HttpResult<()> {
        let bare = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
        let is_allowed = match bare.parse() {
            Ok(address) => self.allows(address),
            Err(_) => self == HostPolicy::Configured || !bare.eq_ignore_ascii_case(METADATA_NAME),
        };
        if is_allowed { Ok(()) } else { Err(self.refusal(host)) }
    }

    fn refusal(self, host: &str) -> HttpError {
        let how = if self == HostPolicy::Redirected { "the server redirected to" } else { "the URL names" };
        refused(format!("{how} {host}, an address of this machine's own network"))
    }
}

impl Resolve for HostPolicy {
    fn resolve(&self, name: Name) -> Resolving {
        let (policy, port) = (*self, addresses::port_of(name.as_str()));
        Box::pin(async move {
            let found: Vec<_> = lookup_host((name.as_str(), port.unwrap_or_default())).await?.collect();
            let mut allowed: Vec<_> = found.iter().copied().filter(|address| policy.allows(address.ip())).collect();
            if allowed.is_empty() && !found.is_empty() {
                return Err(policy.refusal(name.as_str()).into());
            }
            if port.is_some() {
                addresses::sort(&mut allowed).await;
            }
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}
